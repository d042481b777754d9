#!/usr/bin/env bash
# Fetches a long text for `kvpack eval --model --documents`: Persuasion by Jane Austen (1818, public domain), with one
# paragraph per line. It comes from Debian's package r-cran-janeaustenr (MIT), which stores it as R data. The script
# downloads and unpacks the package, checks the text by its digest, and installs nothing. It needs Debian's apt-get and
# python3.
#
#   scripts/fetch-text.sh [FOLDER]      into texts by default
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder="${1:-texts}"
text=persuasion.txt
text_sha256=9f701ce7b160a5a777409f94ab1e3721dc9ebf248809aed5c740e7355a6ff4cc

check() { # sha256, file
    echo "$1  $2" | sha256sum --check --status
}

if [ -f "$folder/$text" ] && check "$text_sha256" "$folder/$text"; then
    echo "$folder/$text is there"
    exit
fi
for tool in apt-get dpkg-deb python3; do
    command -v "$tool" >/dev/null || {
        echo "$tool is needed to fetch the text; any other long text can be named with --text" >&2
        exit 1
    }
done
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
download="$(mktemp -d "$folder/.fetch.XXXXXX")"
trap 'rm -rf "$download"' EXIT
(cd "$download" && apt-get download -qq r-cran-janeaustenr 2>/dev/null) || {
    echo "apt-get cannot download r-cran-janeaustenr; run apt-get update first" >&2
    exit 1
}
dpkg-deb -x "$download"/*.deb "$download/unpacked"
python3 - "$download/unpacked/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb" "$download/$text" <<'PYTHON'
import struct, sys, zlib

def lines(serialised):
    """The strings of a character vector as R serialises it (XDR, version 3)."""
    encoding, = struct.unpack_from(">i", serialised, 14)
    at = 18 + encoding
    kind, count = struct.unpack_from(">ii", serialised, at)
    assert kind == 16, "no character vector"
    at, found = at + 8, []
    for _ in range(count):
        length, = struct.unpack_from(">i", serialised, at + 4)
        found.append(serialised[at + 8 : at + 8 + length].decode("utf-8"))
        at += 8 + length
    return found

# Objects are contiguous. Each is the length of the plain bytes, then a zlib stream.
data, at, books = open(sys.argv[1], "rb").read(), 0, []
while at + 4 < len(data):
    stream = zlib.decompressobj()
    books.append(lines(stream.decompress(data[at + 4 :])))
    at = len(data) - len(stream.unused_data)
book = next(book for book in books if book[0] == "Persuasion")
paragraphs = "\n".join(book).split("\n\n")
paragraphs = [" ".join(paragraph.split()) for paragraph in paragraphs]
text = "\n\n".join(paragraph for paragraph in paragraphs if paragraph)
start = text.index("Chapter 1")
open(sys.argv[2], "w", encoding="utf-8").write(text[start:] + "\n")
PYTHON
check "$text_sha256" "$download/$text" || {
    echo "what was fetched is not $text as it was expected: its sha256 differs" >&2
    exit 1
}
mv "$download/$text" "$folder/$text"
echo "fetched $folder/$text"
