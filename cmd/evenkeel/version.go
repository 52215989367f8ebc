package main

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"
)

// version and commit are set by make (-ldflags -X). A plain build has no version, but the commit
// that Go recorded.
var version, commit = "dev", ""

type versionCmd struct{}

func (versionCmd) Run(std streams) error {
	v, c := buildInfo()
	_, err := fmt.Fprintf(std.out, "evenkeel %s, commit %s, %s %s/%s\n", v, c, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return err
}

// program is version and commit in short.
func program() string {
	v, c := buildInfo()
	return v + " " + c[:min(len(c), 12)]
}

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
