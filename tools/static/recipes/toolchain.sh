# The compilers for both architectures and the tools beside them, as single words, because configure
# scripts want one. The flags are here, so that neither they nor a directory's name gets into OpenSSL's
# record of how it was compiled.
#
# zig turns on checks for undefined behaviour where no -O is given, and refuses __DATE__, which follows
# SOURCE_DATE_EPOCH anyway. Debian's gcc compiles AWS-LC alone, with zig's headers of musl and Linux.
flags="-g0 -fno-sanitize=all -Wno-date-time -ffunction-sections -fdata-sections"

mkdir bin
for arch in x86_64 aarch64; do
    for word in cc c++; do
        cat >bin/$arch-$word <<END
#!/bin/sh
exec "\$WORK/$ZIG/ziglang/zig" $word -target $arch-linux-musl $flags -ffile-prefix-map="\$WORK"=. "\$@"
END
    done
    cat >bin/$arch-gcc <<END
#!/bin/sh
headers="\$WORK/$ZIG/ziglang/lib/libc/include"
exec $arch-linux-gnu-gcc -nostdinc -isystem "\$($arch-linux-gnu-gcc -print-file-name=include)" \
    -isystem "\$headers/$arch-linux-musl" -isystem "\$headers/generic-musl" \
    -isystem "\$headers/${arch%_64}-linux-any" -isystem "\$headers/any-linux-any" \
    -g0 -ffile-prefix-map="\$WORK"=. "\$@"
END
done
for tool in ar ranlib; do
    printf '#!/bin/sh\nexec "$WORK/%s/ziglang/zig" %s "$@"\n' "$ZIG" "$tool" >bin/zig-$tool
done
chmod 755 bin/*
