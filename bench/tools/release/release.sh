#!/usr/bin/env bash
# Makes out/release for `make release`: for each platform an archive, a bill of materials, the container
# image, a deb and an rpm, then the Helm chart and SHA256SUMS. The same commit and the same Go give the same
# bytes on every machine: all times are the commit's, files are those of the commit, and no file's rights
# are those of the work tree. To release what CHANGELOG.md begins with, tag the commit (git tag v1.2.3), run
# make release, and then begin the section of the next version.
set -euo pipefail
cd "$(dirname "$0")/../../.."
: "${VERSION:?}" "${LDFLAGS:?}" "${PLATFORMS:?}" "${TOOLS:?}" "${NFPM:?}"
umask 022
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
out=out/release
left_out=()
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT

[[ $VERSION =~ ^[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$ ]] || {
	echo "VERSION is $VERSION: write it as 1.2.3 or 1.2.3-rc.1, so that packages and the chart can have it"
	exit 1
}
number=${VERSION%%-*}
if [[ -n $(git tag --list "v$number") && -z $(git tag --points-at HEAD --list "v$number") ]]; then
	echo "v$number is released already: begin a section for the next version in CHANGELOG.md"
	exit 1
fi
rm -rf $out && mkdir -p $out
export PACKAGE_VERSION=${VERSION//-/\~} # ~: a package that comes before the version

if [ ! -x "$TOOLS/nfpm" ] && ! GOBIN=$TOOLS go install "github.com/goreleaser/nfpm/v2/cmd/nfpm@$NFPM"; then
	left_out+=("deb and rpm: nfpm could not be installed")
fi
if [ "$(tar --version 2>/dev/null | head -c 7)" != "tar (GN" ]; then
	left_out+=("the archives and the chart: tar is not GNU tar")
fi
packed() { # FOLDER NAME: the folder's NAME as a tar.gz
	tar -C "$1" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=u+rw,go=rX -cf - "$2" | gzip -9n
}

# What is the same on every platform. The program says it itself.
common=$work/common
mkdir -p "$common/completion"
git archive HEAD README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md SECURITY.md LICENSE docs configs bench/README.md bench/lab/trace/NOTICE | tar -xC "$common"
chart=$common/configs/kubernetes/chart
sed -i "s|^version:.*|version: $VERSION|; s|^appVersion:.*|appVersion: \"$VERSION\" # the tag of the image where values name none|" "$chart/Chart.yaml"
for shell in bash zsh fish; do bin/evenkeel completion $shell >"$common/completion/evenkeel.$shell"; done
bin/evenkeel man >"$common/evenkeel.1"
bench/tools/release/licences.sh >"$common/licences.txt"

for platform in $PLATFORMS; do
	ARCH=${platform#*/} name=evenkeel_${VERSION}_${platform/\//_}
	dir=$work/$name
	cp -r "$common" "$dir"
	GOOS=${platform%/*} GOARCH=$ARCH go build -buildvcs=false -ldflags "$LDFLAGS -buildid=" -o "$dir/evenkeel" ./cmd/evenkeel
	go run ./bench/tools/release/sbom -version "$VERSION" "$dir/evenkeel" >"$out/$name.cdx.json"
	if [[ ${left_out[*]} != *archives* ]]; then
		packed "$work" "$name" >"$out/$name.tar.gz"
	fi
	go run ./bench/outside/image -bin "$dir/evenkeel" -tag "evenkeel:$VERSION" -out "$work/image.tar"
	gzip -9nc "$work/image.tar" >"$out/$name.image.tar.gz"
	if [ -x "$TOOLS/nfpm" ] && [ "${platform%/*}" = linux ]; then
		gzip -9n "$dir/evenkeel.1"
		sed '1,/^\[Unit\]/ { /^\[Unit\]/!d }; s|/usr/local/bin/|/usr/bin/|; s|^Documentation=.*|Documentation=man:evenkeel(1)|' configs/systemd/evenkeel.service >"$dir/evenkeel.service"
		chmod -R u=rwX,go=rX "$dir"
		find "$dir" -exec touch -d "@$SOURCE_DATE_EPOCH" {} +
		export ARCH DIR=$dir
		for kind in deb rpm; do "$TOOLS/nfpm" package -f configs/packages/nfpm.yaml -p $kind -t $out/ >"$work/said" || { cat "$work/said"; exit 1; }; done
	fi
done
if [[ ${left_out[*]} != *archives* ]]; then
	mkdir "$work/chart" && cp -r "$chart" "$work/chart/evenkeel"
	packed "$work/chart" evenkeel >"$out/evenkeel-$VERSION.tgz"
fi
(cd $out && sha256sum -- *[!S] >SHA256SUMS && cat SHA256SUMS)
for part in "${left_out[@]}"; do echo "left out: $part"; done
