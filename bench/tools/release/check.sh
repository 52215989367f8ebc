#!/usr/bin/env bash
# Makes the release of this commit for one platform from two fresh clones, for `make release-check`. Both
# must be the same, byte by byte, and the deb must have the files of files.txt, with their rights.
set -euo pipefail
cd "$(dirname "$0")/../../.."
: "${TOOLS:?}"
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
arch=$(go env GOARCH)
fail() { echo "$1: see configs/packages/nfpm.yaml and bench/tools/release/release.sh"; exit 1; }
make_release() { # FOLDER
	git clone -q . "$work/$1"
	make --no-print-directory -C "$work/$1" release PLATFORMS="linux/$arch" TOOLS="$TOOLS" >"$work/said" 2>&1 || { cat "$work/said"; exit 1; }
}
make_release one
(umask 077 && TZ=Asia/Tokyo make_release another-name)
diff -r "$work/one/out/release" "$work/another-name/out/release"
(cd "$work/one/out/release" && sha256sum --quiet -c SHA256SUMS)
grep '^left out' "$work/said" || true
echo "two releases of $(git describe --always) are the same: $(find "$work/one/out/release" -type f | wc -l) files"
archive=$(find "$work/one/out/release" -name "evenkeel_*_linux_$arch.tar.gz")
if [ -n "$archive" ]; then
	mkdir "$work/unpacked" && tar -xzf "$archive" --strip-components=1 -C "$work/unpacked"
	cd "$work/unpacked"
	find README.md docs -name '*.md' -print0 | while IFS= read -r -d '' page; do
		{ grep -oE '\]\([^)#: ]+' "$page" || true; } | cut -c3- | sort -u | while read -r to; do
			[ "$to" = https ] || [ -e "$(dirname "$page")/$to" ] || fail "$page links to $to, which the archive lacks"
		done
	done
	cd - >/dev/null
	echo "each link in README.md and docs leads to a file of the archive"
fi
deb=$(find "$work/one/out/release" -name '*.deb')
if [ -n "$deb" ] && command -v dpkg-deb >/dev/null; then
	# Without the folders of every Debian.
	dpkg-deb -c "$deb" | awk '$1 !~ /^d/ || $6 ~ /evenkeel/ {print $1, $2, $6}' | diff bench/tools/release/files.txt -
	# What the administrator changed in it stays.
	[ "$(dpkg-deb -I "$deb" conffiles)" = /etc/evenkeel/evenkeel.yaml ] || fail "the config is no conffile"
	# The unit is that of the repository, for a program that lies in /usr/bin.
	dpkg-deb --fsys-tarfile "$deb" | tar -xO ./usr/lib/systemd/system/evenkeel.service >"$work/unit"
	grep -q '^ExecStart=/usr/bin/evenkeel serve' "$work/unit" || fail "the unit does not start /usr/bin/evenkeel"
	if grep /usr/local "$work/unit"; then fail "the unit has a path of an installation by hand"; fi
	echo "the deb has the files of files.txt"
fi
