# The source text of one of the pinned archives, without its top directory.
tar --extract --file "$ARCHIVE" --strip-components=1 --no-same-owner
