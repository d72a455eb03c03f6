# TLS 1.2 and 1.3, and the algorithms that they and registries' tokens use. Nothing here can load a
# provider, so this OpenSSL can never have a FIPS module. /etc/ssl is where it looks for openssl.cnf,
# cert.pem and certs/; _regsync/net/tls.py looks further.
CC=$ARCH-cc CFLAGS="-O2" AR=zig-ar RANLIB=zig-ranlib perl ../$SOURCE/Configure linux-$ARCH \
    --prefix=/nonexistent --openssldir=/etc/ssl --libdir=lib \
    no-shared no-module no-dso no-engine no-tests no-docs no-apps no-legacy \
    no-ssl3 no-tls1 no-tls1_1 no-dtls no-comp no-quic no-ct no-cms no-cmp no-ts no-srp \
    no-aria no-bf no-camellia no-cast no-gost no-idea no-md4 no-mdc2 no-rc2 no-rc4 no-rc5 no-seed \
    no-sm2 no-sm3 no-sm4 no-whirlpool no-afalgeng no-async no-ui-console
make -j"$JOBS" build_libs
make install_dev DESTDIR="$PWD/installed"
mv installed/nonexistent prefix
cp ../$SOURCE/LICENSE.txt prefix/LICENSE
