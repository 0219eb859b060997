#!/bin/sh
# Makes the image that agentkit/base is built on where no registry can be reached: a minimal Debian with Python, from
# Debian's own packages. Usage: debootstrap.sh [TAG]; needs root, debootstrap and a running engine, takes 1 to 5 minutes.
#
#   MIRROR  where the packages come from (http://deb.debian.org/debian)
#   SUITE   the release (bookworm)
#   INCLUDE further packages, separated by commas (none)
#   DOCKER  the command that imports the image (docker)
set -eu

tag=${1:-agentkit/debian:bookworm}
mirror=${MIRROR:-http://deb.debian.org/debian}
suite=${SUITE:-bookworm}
include=python3,procps,ca-certificates${INCLUDE:+,$INCLUDE}

[ "$(id -u)" = 0 ] || { echo "debootstrap needs root: run this with sudo" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "debootstrap is missing: apt-get install debootstrap" >&2; exit 1; }

umask 022 # whoever runs in the image is neither root nor of root's group
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
trap 'exit 1' HUP INT TERM
chmod 0755 "$tree"

# python3, not python3-minimal: environments use more of the standard library than the minimal package has.
debootstrap --variant=minbase --include="$include" "$suite" "$tree" "$mirror" >"$tree.log" 2>&1 || {
    tail -n 20 "$tree.log" >&2
    rm -f "$tree.log"
    echo "debootstrap failed; is $mirror reachable?" >&2
    exit 1
}
rm -f "$tree.log"

# What no sandbox reads: a third of the size.
rm -rf "$tree"/var/cache/apt/* "$tree"/var/lib/apt/lists/* "$tree"/var/log/* \
    "$tree"/usr/share/doc/* "$tree"/usr/share/man/* "$tree"/usr/share/locale/* "$tree"/usr/share/info/*

tar -C "$tree" --numeric-owner --one-file-system -c . |
    ${DOCKER:-docker} import --change 'ENV PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8' \
        --change 'CMD ["python3"]' --message "debootstrap $suite" - "$tag"
