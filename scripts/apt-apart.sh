# A second apt, for packages of another Debian suite. Its lists and downloads are in a folder of the caller. It neither
# reads nor changes those of the system, and installs nothing. Sourced, never run.
# shellcheck shell=bash

# Chooses the suite. Fails if the system is not Debian.
apart_suite() { # folder, suite
    local folder="$1" suite="$2" keyring=/usr/share/keyrings/debian-archive-keyring.gpg mirror
    command -v apt-get >/dev/null && [ -f "$keyring" ] || return 1
    # The mirror that this system uses.
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep '/debian/*$' | sed -n 1p) || return 1
    mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
    echo "deb [signed-by=$keyring] $mirror $suite main" >"$folder/sources.list"
}

apart() { # folder, apt command...
    local folder="$1"
    shift
    "$1" -o Dir::Etc::sourcelist="$folder/sources.list" -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists="$folder/lists" \
        -o Dir::Cache="$folder/cache" -o APT::Sandbox::User=root -o APT::Get::List-Cleanup=0 "${@:2}" </dev/null
}
