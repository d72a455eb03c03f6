# A CPython of the same version for this machine. It freezes modules and compiles bytecode, so that no
# Python of the machine has an influence; it has only the extension modules that this takes.
mkdir Modules
cat >Modules/Setup.local <<'END'
*static*
_struct _struct.c
math mathmodule.c
binascii binascii.c
_json _json.c
END
CC=x86_64-cc LDFLAGS="-static -s" AR=zig-ar RANLIB=zig-ranlib READELF=readelf ../$SOURCE/configure \
    --prefix=/usr/local --without-ensurepip --disable-test-modules --with-pkg-config=no
make -j"$JOBS" LINKFORSHARED=" " python

mkdir -p home/lib bin
ln -s ../../../$SOURCE/Lib home/lib/python3.13
cat >bin/build-python <<END
#!/bin/sh
export PYTHONHOME="\$WORK/${PWD##*/}/home"
exec "\$WORK/${PWD##*/}/python" -S -B "\$@"
END
chmod 755 bin/build-python
bin/build-python -c 'import json, sys; print(sys.version)'
