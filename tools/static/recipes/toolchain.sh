# The compiler for both architectures and the tools beside it, as single words, because configure
# scripts want one. The flags are here, so that neither they nor a directory's name gets into OpenSSL's
# record of how it was compiled.
#
# zig turns on checks for undefined behaviour where no -O is given, and refuses __DATE__, which follows
# SOURCE_DATE_EPOCH anyway.
flags="-g0 -fno-sanitize=all -Wno-date-time -ffunction-sections -fdata-sections"

mkdir bin
for arch in x86_64 aarch64; do
    cat >bin/$arch-cc <<END
#!/bin/sh
exec "\$WORK/$ZIG/ziglang/zig" cc -target $arch-linux-musl $flags -ffile-prefix-map="\$WORK"=. "\$@"
END
done
for tool in ar ranlib; do
    printf '#!/bin/sh\nexec "$WORK/%s/ziglang/zig" %s "$@"\n' "$ZIG" "$tool" >bin/zig-$tool
done
chmod 755 bin/*
