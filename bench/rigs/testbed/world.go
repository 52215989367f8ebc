// Package testbed has what a benchmark or a test of endurance is played in: programs
// under test that are built, started, asked and ended, reference engines, ways
// between them that can be cut, and the table of what was held.
package testbed

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"evenkeel/bench/lab/refengine"
)

// World is the folder of a run and all that was started for it.
type World struct {
	Dir    string
	Binary string // the program under test
	HTTP   *http.Client

	keep bool
	ends []func()
}

// New makes the folder of a run, with configs and logs, and builds the program
// unless the options name one. flags are further ones of `go build`.
func New(ctx context.Context, name string, o Options, flags ...string) (w *World, err error) {
	w = &World{Dir: o.Keep, keep: o.Keep != "", HTTP: &http.Client{Timeout: 30 * time.Second}}
	if w.keep {
		err = os.MkdirAll(w.Dir, 0o700)
	} else {
		w.Dir, err = os.MkdirTemp("", "evenkeel-"+name+"-")
	}
	if err != nil {
		return nil, err
	}
	w.AtEnd(w.HTTP.CloseIdleConnections)
	if w.Binary, err = build(ctx, o.Bin, w.Dir, flags); err != nil {
		return nil, errors.Join(err, w.Close(true))
	}
	return w, nil
}

const race = "-race=true" // which wants cgo

// build is the program: the one that its user named, or else one that is built into
// a folder.
func build(ctx context.Context, named, folder string, flags []string) (string, error) {
	if named != "" {
		return filepath.Abs(named)
	}
	binary := filepath.Join(folder, "evenkeel")
	cmd := exec.CommandContext(ctx, "go",
		append(append([]string{"build", "-ldflags=-s -w", "-o", binary}, flags...), "evenkeel/cmd/evenkeel")...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // as releases are built, and without what only a debugger reads
	if slices.Contains(flags, race) {
		cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w: %s", err, out)
	}
	return binary, nil
}

// AtEnd has Close end something, before all that came before it.
func (w *World) AtEnd(end func()) { w.ends = append(w.ends, end) }

// Close ends everything, what came last first. remove says whether the files go;
// those that a user wants to keep stay.
func (w *World) Close(remove bool) error {
	for _, end := range slices.Backward(w.ends) {
		end()
	}
	w.ends = nil
	if remove && !w.keep {
		return os.RemoveAll(w.Dir)
	}
	return nil
}

// File is the path of a file of the run.
func (w *World) File(name string) string { return filepath.Join(w.Dir, name) }

// Write writes a file of the run. It is renamed into its place as a whole, as
// config management does it.
func (w *World) Write(name, text string) error {
	path := w.File(name)
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// Engines starts reference engines, one for each config.
func (w *World) Engines(configs ...refengine.Config) (list []*refengine.Engine, err error) {
	for _, c := range configs {
		e, err := refengine.Start(c)
		if err != nil {
			return nil, err
		}
		w.AtEnd(e.Close)
		list = append(list, e)
	}
	return list, nil
}

// Way opens a way to an address that can be cut, and on which every byte takes so
// long.
func (w *World) Way(to string, delay time.Duration) (*Relay, error) {
	r, err := NewRelay(to, delay)
	if err == nil {
		w.AtEnd(r.Close)
	}
	return r, err
}

// Start starts a command. Its log is a file of that name.
func (w *World) Start(name string, cmd *exec.Cmd) (*Process, error) {
	p, err := Start(cmd, w.File(name+".log"))
	if err == nil {
		w.AtEnd(p.Kill)
	}
	return p, err
}

// At is a listener that wants no token.
func (w *World) At(address string) Admin { return Admin{Address: address, Client: w.HTTP} }
