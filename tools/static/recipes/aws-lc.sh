# AWS-LC with its FIPS module. gcc compiles its C and assembly, because `delocate`, the step that makes the
# module, cannot read what a newer clang writes; the headers are the same as everywhere, and zig compiles
# libssl, which is C++. The module's bytes depend on gcc, so that it is pinned by its version.
#
# C++ is only compiled (-c): for a link, which cmake would try, zig builds a library that nothing needs.
# delocate and inject_hash, which writes the module's checksum into it, are AWS-LC's own and in Go.
test "$($ARCH-linux-gnu-gcc -dumpfullversion)" = 12.2.0
export GOTOOLCHAIN=local GOPROXY=off CGO_ENABLED=0
cmake -S ../$SOURCE/aws-lc -B . -G Ninja -DFIPS=1 \
    -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DBUILD_TESTING=OFF -DBUILD_TOOL=OFF \
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$ARCH -DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY \
    -DCMAKE_C_COMPILER=$ARCH-gcc -DCMAKE_ASM_COMPILER=$ARCH-gcc -DCMAKE_CXX_COMPILER=$ARCH-c++ \
    -DCMAKE_CXX_FLAGS=-c -DCMAKE_CXX_FLAGS_RELEASE="-O3 -DNDEBUG -Wno-error"
ninja -j"$JOBS" crypto ssl

mkdir -p prefix/lib
cp crypto/libcrypto.a ssl/libssl.a prefix/lib
cp -r ../$SOURCE/aws-lc/include prefix/include
cp ../$SOURCE/aws-lc/LICENSE prefix/LICENSE
