# What Python needs of SQLite: serialized threads; nothing that would load a library.
mkdir include lib
cp ../$AMALGAMATION/sqlite3.h include
$ARCH-cc -O2 -DSQLITE_THREADSAFE=1 -DSQLITE_OMIT_LOAD_EXTENSION -DSQLITE_DEFAULT_MEMSTATUS=0 \
    -DSQLITE_DQS=0 -DHAVE_FDATASYNC -DHAVE_USLEEP -c ../$AMALGAMATION/sqlite3.c -o sqlite3.o
zig-ar rcsD lib/libsqlite3.a sqlite3.o
