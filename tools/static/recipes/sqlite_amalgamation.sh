# SQLite's own tools join its source into one file; they need a C compiler and bring their Tcl.
make -f ../$SOURCE/Makefile.linux-generic TOP=../$SOURCE TCLSH_CMD= CC=x86_64-cc B.cc="x86_64-cc -O1" sqlite3.c
