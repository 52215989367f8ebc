#!/bin/sh
# Prints what follows the version in this commit's name: nothing where the commit has the tag $1 and the
# work tree has no changes. Otherwise the time of the commit stands first, so that a package of a later
# commit replaces one of an earlier commit. The length of the hash does not depend on the clone.
cd "$(dirname "$0")/../../.." || exit
hash=$(git describe --always --exclude '*' --abbrev=12 --dirty 2>/dev/null) || { echo -dev.0; exit; }
at=$(TZ=UTC git log -1 --date=format-local:%Y%m%d%H%M%S --format=%cd)
case $(git tag --points-at HEAD --list "$1") in
"$1") case $hash in *-dirty) echo "-dev.$at.g$hash" ;; esac ;;
*) echo "-dev.$at.g$hash" ;;
esac
