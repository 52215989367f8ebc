package main

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"
)

// version and commit are set by make (-ldflags -X). After a plain go build, there is no version,
// and the commit is the one that Go records in the program.
var version, commit = "dev", ""

type versionCmd struct{}

// Run prints the version, the commit, and the Go version and platform of the build.
func (versionCmd) Run(std streams) error {
	v, c := buildInfo()
	_, err := fmt.Fprintf(std.out, "evenkeel %s, commit %s, %s %s/%s\n", v, c, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return err
}

// versionText returns the version and the first 12 characters of the commit, for the admin
// listener.
func versionText() string {
	v, c := buildInfo()
	return v + " " + c[:min(len(c), 12)]
}

// buildInfo returns the version and the commit of this program; "dev" and "unknown" if they are not
// recorded.
func buildInfo() (v, c string) {
	v, c = version, commit
	if info, ok := debug.ReadBuildInfo(); ok && c == "" {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				c = s.Value
			}
		}
	}
	return v, cmp.Or(c, "unknown")
}
