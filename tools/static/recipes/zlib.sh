# zlib without its gz* functions, which would open files.
names="adler32 compress crc32 deflate infback inffast inflate inftrees trees uncompr zutil"
for name in $names; do
    $ARCH-cc -O3 -DHAVE_UNISTD_H -I../$SOURCE -c ../$SOURCE/$name.c -o $name.o
done
mkdir include lib
cp ../$SOURCE/zlib.h ../$SOURCE/zconf.h include
zig-ar rcsD lib/libz.a *.o
