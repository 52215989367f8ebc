#!/usr/bin/env bash
# Prints the licences of all that is in the program: evenkeel, Go, each module, and the traces of others.
set -euo pipefail
cd "$(dirname "$0")/../../.."
export LC_ALL=C CGO_ENABLED=0 GOOS=linux
text() { printf '\n===== %s =====\n\n' "$1" && cat "$2"; }
text evenkeel LICENSE
text "traces of requests" bench/lab/trace/NOTICE
text Go "$(go env GOROOT)/LICENSE"
modules=$(go list -deps -f '{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}} {{.Dir}}{{end}}{{end}}' ./cmd/evenkeel | sort -u)
while read -r module version dir; do
	files=$(find "$dir" -maxdepth 2 -type f \( -path "$dir/licenses/*" -o -path "$dir/*" ! -path "$dir/*/*" \
		\( -iname 'licen[cs]e*' -o -iname 'copying*' -o -iname 'notice*' -o -iname 'patents*' \) \) | sort)
	[ -n "$files" ] || { echo "$module has no file with its licence: look into $dir, and add the name of that file to $0" >&2; exit 1; }
	while read -r file; do text "$module $version, ${file#"$dir/"}" "$file"; done <<<"$files"
done <<<"$modules"
