#!/usr/bin/env bash
# Makes out/release for `make release`: for each platform an archive, a bill of materials,
# a deb and an rpm, then SHA256SUMS. The same commit gives the same bytes on every machine:
# all times are the commit's, and no file's rights are those of the work tree.
set -euo pipefail
cd "$(dirname "$0")/../../.."
: "${VERSION:?}" "${LDFLAGS:?}" "${PLATFORMS:?}" "${TOOLS:?}" "${NFPM:?}"
umask 022
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
out=out/release
left_out=()
rm -rf $out && mkdir -p $out
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT

# A package's version begins with a digit. Commits after a tag come after it (+), a
# candidate before it (~).
PACKAGE_VERSION=$(sed -E 's/^v//; s/-([0-9]+)-g([0-9a-f]+)$/+\1.g\2/; s/-/~/g' <<<"$VERSION")
[[ $PACKAGE_VERSION =~ ^[0-9]+\. ]] || PACKAGE_VERSION=0.0.0+$PACKAGE_VERSION
export PACKAGE_VERSION

if [ ! -x "$TOOLS/nfpm" ] && ! GOBIN=$TOOLS go install "github.com/goreleaser/nfpm/v2/cmd/nfpm@$NFPM"; then
	left_out+=("deb and rpm: nfpm could not be installed")
fi
if [ "$(tar --version 2>/dev/null | head -c 7)" != "tar (GN" ]; then
	left_out+=("the archives: tar is not GNU tar")
fi

# What is the same on every platform. The program says it itself.
common=$work/common
mkdir -p "$common/completion"
cp -r README.md CHANGELOG.md SECURITY.md LICENSE docs configs "$common"
for shell in bash zsh fish; do bin/evenkeel completion $shell >"$common/completion/evenkeel.$shell"; done
bin/evenkeel man >"$common/evenkeel.1"

for platform in $PLATFORMS; do
	ARCH=${platform#*/} name=evenkeel_${VERSION}_${platform/\//_}
	dir=$work/$name
	cp -r "$common" "$dir"
	GOOS=${platform%/*} GOARCH=$ARCH go build -buildvcs=false -ldflags "$LDFLAGS -buildid=" -o "$dir/evenkeel" ./cmd/evenkeel
	go run ./bench/tools/release/sbom -version "$VERSION" "$dir/evenkeel" >"$out/$name.cdx.json"
	if [[ ${left_out[*]} != *archives* ]]; then
		tar -C "$work" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=u+rw,go=rX -cf - "$name" | gzip -9n >"$out/$name.tar.gz"
	fi
	if [ -x "$TOOLS/nfpm" ] && [ "${platform%/*}" = linux ]; then
		gzip -9n "$dir/evenkeel.1"
		sed '1,/^\[Unit\]/ { /^\[Unit\]/!d }; s|/usr/local/bin/|/usr/bin/|; s|^Documentation=.*|Documentation=man:evenkeel(1)|' configs/systemd/evenkeel.service >"$dir/evenkeel.service"
		chmod -R u=rwX,go=rX "$dir"
		find "$dir" -exec touch -d "@$SOURCE_DATE_EPOCH" {} +
		export ARCH DIR=$dir
		for kind in deb rpm; do "$TOOLS/nfpm" package -f configs/packages/nfpm.yaml -p $kind -t $out/ >"$work/said" || { cat "$work/said"; exit 1; }; done
	fi
done
(cd $out && sha256sum -- *[!S] >SHA256SUMS && cat SHA256SUMS)
for part in "${left_out[@]}"; do echo "left out: $part"; done
