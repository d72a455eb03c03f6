# SQLite's own tools join its source into one file; they need a C compiler and bring their Tcl.
make -f ../$SOURCE/Makefile.linux-generic TOP=../$SOURCE TCLSH_CMD= CC=x86_64-cc B.cc="x86_64-cc -O1" sqlite3.c
# What Python needs of it: serialized threads; nothing that would load a library.
mkdir include lib
cp sqlite3.h include
$ARCH-cc -O2 -DSQLITE_THREADSAFE=1 -DSQLITE_OMIT_LOAD_EXTENSION -DSQLITE_DEFAULT_MEMSTATUS=0 \
    -DSQLITE_DQS=0 -DHAVE_FDATASYNC -DHAVE_USLEEP -c sqlite3.c -o sqlite3.o
zig-ar rcsD lib/libsqlite3.a sqlite3.o
