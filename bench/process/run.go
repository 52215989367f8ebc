package process

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
)

// Folder is where a run writes configs and logs: keep, or a temporary one that
// has the run's name in its own.
func Folder(keep, name string) (string, error) {
	if keep == "" {
		return os.MkdirTemp("", "evenkeel-"+name+"-")
	}
	return keep, os.MkdirAll(keep, 0o700)
}

const race = "-race=true" // which wants cgo

// Evenkeel is the program that a run starts: the one that its user named, or else
// one that is built into a folder, with further flags of `go build`.
func Evenkeel(ctx context.Context, named, folder string, flags ...string) (string, error) {
	if named != "" {
		return filepath.Abs(named)
	}
	binary := filepath.Join(folder, "evenkeel")
	cmd := exec.CommandContext(ctx, "go", append(append([]string{"build", "-o", binary}, flags...), "evenkeel/cmd/evenkeel")...)
	if !slices.Contains(flags, race) {
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // as releases are built
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w: %s", err, out)
	}
	return binary, nil
}
