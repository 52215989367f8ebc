#!/usr/bin/env bash
# Passes on what `go test -cover` prints, and fails where the tests of a package run less than half of its
# statements: bench/tools/ci/covered.sh [PACKAGES THAT ARE NOT MEASURED...] < OUTPUT. The table "package | why its own
# tests run less" of ARCHITECTURE.md has the exceptions. A package that stands there without need fails, too.
set -euo pipefail
awk -v unmeasured="$*" '
BEGIN {
	for (n = split(unmeasured, list); n; n--) {
		sub(/^\./, "evenkeel", list[n])
		whole = whole (sub(/\/\.\.\.$/, "", list[n]) ? "|" list[n] "(/.*)?" : "|" list[n])
	}
	whole = "^(" substr(whole, 2) ")$"
}
FILENAME != "-" {
	table = table && /^\|/ || /^\| package \| why its own tests run less \|/
	if (table && match($0, /`[^`]+`/)) excepted["evenkeel/" substr($0, RSTART + 1, RLENGTH - 2)] = 1
	next
}
{ print; fflush() }
match($0, /coverage: [0-9.]+% of statements/) {
	share = substr($0, RSTART + 10) + 0
	package = $1 == "ok" ? $2 : $1
	if (package ~ whole) next
	if (share < 50 && !excepted[package]) complain(package ": its own tests run " share "% of its statements; at least half is wanted")
	if (share >= 50 && excepted[package]) complain(package ": its own tests run " share "% of its statements: take it off the table of ARCHITECTURE.md")
}
function complain(what) { print what > "/dev/stderr"; bad = 1 }
END { exit bad }' "$(dirname "$0")/../../../ARCHITECTURE.md" -
