# The executable without a program behind it.
../$BUILD_PYTHON/bin/build-python "$FOLDER/freeze.py" ../$SOURCE/Lib "$FOLDER/modules.txt"
flags="-O2 -flto -I../$SOURCE/Include -I../$PYTHON -I../$CRYPTO/prefix/include"
cp "$FOLDER/main.c" main.c
$ARCH-cc $flags -c main.c -o main.o
$ARCH-cc $flags -c frozen.c -o frozen.o
# musl's threads have 128 KiB of stack, too little for a deep recursion to end in RecursionError; 8 MiB
# is the most that it takes from this field.
$ARCH-cc -static -flto -Wl,--gc-sections -Wl,-z,stack-size=8388608 -o runtime main.o frozen.o \
    ../$PYTHON/libpython3.13.a ../$CRYPTO/prefix/lib/libssl.a ../$CRYPTO/prefix/lib/libcrypto.a \
    ../$SQLITE/lib/libsqlite3.a ../$ZLIB/lib/libz.a -lm
# Where everything is in the executable: tests read it (tests/test_static.py).
readelf --symbols --wide runtime >symbols
$ARCH-linux-gnu-strip runtime

mkdir licenses
cp ../$SOURCE/LICENSE licenses/CPython
cp ../$CRYPTO/prefix/LICENSE "licenses/$LIBRARY"
cp ../$SQLITE_SOURCE/LICENSE.md licenses/SQLite
cp ../$ZLIB_SOURCE/LICENSE licenses/zlib
cp ../$SOURCE/Doc/license.rst licenses/CPython-incorporated
cp "$WORK/$ZIG/ziglang/lib/libc/musl/COPYRIGHT" licenses/musl
cp "$WORK/$ZIG/ziglang/LICENSE" licenses/zig
