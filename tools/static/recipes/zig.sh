# The compiler as its wheel brings it: clang, lld, and the source of musl.
python3 -m zipfile -e "$ARCHIVE" .
chmod 755 ziglang/zig
