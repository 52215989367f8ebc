// Package files tells when files may have changed, however they are replaced:
// written in place, renamed over, or behind symlinks that are swapped, as a
// Kubernetes ConfigMap's are.
package files

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"go.uber.org/zap"
)

const (
	quiet = 50 * time.Millisecond // no event for so long: whoever writes is through
	most  = time.Second           // or so long after the first
	// poll finds what no event tells of: changes on network file systems, and
	// directories that were replaced themselves.
	poll = 10 * time.Second
)

// Watch calls changed after the files may have changed, until ctx ends: the
// caller looks which did. list is asked again after each call. Where the system
// cannot tell of events, changed is called from time to time.
func Watch(ctx context.Context, list func() []string, changed func(), log *zap.Logger) {
	w := &watcher{dirs: map[string]bool{}, log: log}
	var events chan fsnotify.Event
	var errs chan error
	if n, err := fsnotify.NewWatcher(); err != nil {
		log.Warn("the system cannot tell the proxy when files change, so the proxy looks at them from time to time; raise "+
			"fs.inotify.max_user_instances", zap.Error(err), zap.Duration("every", poll))
	} else {
		w.notify, events, errs = n, n.Events, n.Errors
		defer func() { _ = n.Close() }() // only watched
	}
	w.follow(list())
	changed() // what happened before anything was watched
	tick := time.NewTicker(poll)
	defer tick.Stop()
	settled := time.NewTimer(time.Hour)
	settled.Stop()
	defer settled.Stop()
	var first time.Time // event not acted upon; zero: none
	look := func() {
		first = time.Time{}
		changed()
		w.follow(list())
	}
	for {
		select {
		case e := <-events:
			if !w.names[filepath.Clean(e.Name)] || e.Op == fsnotify.Chmod {
				continue
			}
			if first.IsZero() {
				first = time.Now()
			}
			settled.Reset(min(quiet, most-time.Since(first)))
		case err := <-errs: // lost events: look for yourself
			log.Debug("watching files", zap.Error(err))
			look()
		case <-settled.C:
			look()
		case <-tick.C:
			look()
		case <-ctx.Done():
			return
		}
	}
}

// watcher follows directories: a watch on a file would stay with the old one
// when another is renamed over it.
type watcher struct {
	notify *fsnotify.Watcher // nil: there is none to be had
	log    *zap.Logger
	names  map[string]bool // whose events count
	dirs   map[string]bool
}

// follow watches the files and every symlink on the way to them.
func (w *watcher) follow(list []string) {
	w.names = map[string]bool{}
	for _, file := range list {
		for _, name := range way(file) {
			w.names[name] = true
		}
	}
	if w.notify == nil {
		return
	}
	wanted := map[string]bool{}
	for name := range w.names {
		wanted[filepath.Dir(name)] = true
	}
	for dir := range w.dirs {
		if !wanted[dir] {
			_ = w.notify.Remove(dir) // it may be gone
			delete(w.dirs, dir)
		}
	}
	for dir := range wanted { // again each time: one that was replaced is another by that name
		if err := w.notify.Add(dir); err != nil && !os.IsNotExist(err) {
			w.log.Debug("a directory cannot be watched, so the proxy looks at it from time to time", zap.String("dir", dir), zap.Error(err))
			continue
		}
		w.dirs[dir] = true
	}
}

// maxLinks is what Linux follows.
const maxLinks = 40

// way lists what decides which file a path names: every symlink on the way, and
// the file at its end.
func way(path string) (names []string) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil
	}
	done, rest := "/", strings.Split(path, "/")
	for links := 0; len(rest) > 0; {
		at := filepath.Join(done, rest[0])
		rest = rest[1:]
		target, err := os.Readlink(at)
		if err != nil || links == maxLinks {
			done = at
			continue
		}
		links++
		names = append(names, at)
		if filepath.IsAbs(target) {
			done = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	return append(names, done)
}
