# CPython as a static library. It is a cross build for the machine's own architecture too, so that both
# are built alike. Modules/Setup.local has to be there before configure runs, else make passes it over.
mkdir Modules
cp "$FOLDER/tls.h" .
sed -e "s#@CRYPTO@#../$CRYPTO/prefix#g" -e "s#@SQLITE@#../$SQLITE#g" -e "s#@ZLIB@#../$ZLIB#g" \
    "$FOLDER/Setup.local" >Modules/Setup.local
CC=$ARCH-cc CFLAGS_NODIST="-flto" LDFLAGS="-static -s" AR=zig-ar RANLIB=zig-ranlib READELF=readelf \
    CPPFLAGS="-I../$ZLIB/include -I../$SQLITE/include" \
    ../$SOURCE/configure --build=x86_64-pc-linux-gnu --host=$ARCH-linux-musl \
    --with-build-python="$WORK/$BUILD_PYTHON/bin/build-python" \
    --prefix=/usr/local --without-ensurepip --disable-test-modules --with-pkg-config=no \
    --with-openssl="$WORK/$CRYPTO/prefix" --with-builtin-hashlib-hashes= \
    ac_cv_file__dev_ptmx=yes ac_cv_file__dev_ptc=no ac_cv_buggy_getaddrinfo=no
# Never the target `all`, which would try shared modules.
make -j"$JOBS" LINKFORSHARED=" " libpython3.13.a
