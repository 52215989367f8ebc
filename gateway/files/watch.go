// Package files reports that files may have changed, however they are replaced: written in place,
// renamed over, or behind symlinks that change, as in a Kubernetes ConfigMap.
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
	settleTime = 50 * time.Millisecond // after this time without an event, the writer has probably finished
	maxDelay   = time.Second           // changed is called at the latest this long after the first event
	// poll finds changes without events: on network file systems, or if a directory itself was
	// replaced.
	poll = 10 * time.Second
)

// Watch calls changed when the files may have changed, until ctx ends: at the start, after events,
// and at intervals (poll). If the system has no events for files, only the intervals are left. The
// caller checks which files have changed. list returns the files, and is called again after each
// change.
func Watch(ctx context.Context, list func() []string, changed func(), log *zap.Logger) {
	w := &watcher{dirs: map[string]bool{}, log: log}
	var events chan fsnotify.Event // nil: the system has no events, and select never receives one
	var errs chan error
	if notify, err := fsnotify.NewWatcher(); err != nil {
		log.Warn("the system cannot tell the proxy when files change, so the proxy looks at them from time to time; raise "+
			"fs.inotify.max_user_instances", zap.Error(err), zap.Duration("every", poll))
	} else {
		w.notify, events, errs = notify, notify.Events, notify.Errors
		defer func() { _ = notify.Close() }() // an error loses nothing, because no file was written
	}
	w.watchFiles(list())
	changed() // the files may have changed before they were watched
	tick := time.NewTicker(poll)
	defer tick.Stop()
	settled := time.NewTimer(time.Hour) // runs only between an event and the call of changed
	settled.Stop()
	defer settled.Stop()
	var first time.Time // time of the first event since the last call of changed; zero: no event since then
	report := func() {
		first = time.Time{}
		changed()
		w.watchFiles(list())
	}
	for {
		select {
		case e := <-events:
			if !w.names[filepath.Clean(e.Name)] || e.Op == fsnotify.Chmod { // no contents of a file have changed
				continue
			}
			if first.IsZero() {
				first = time.Now()
			}
			settled.Reset(min(settleTime, maxDelay-time.Since(first))) // each event puts the call off, but not for ever
		case err := <-errs: // events may be lost, so look at all files
			log.Debug("watching files", zap.Error(err))
			report()
		case <-settled.C:
			report()
		case <-tick.C:
			report()
		case <-ctx.Done():
			return
		}
	}
}

// watcher watches directories, not files: when a new file is renamed over an old one, a watch on
// the file would stay with the old one.
type watcher struct {
	notify *fsnotify.Watcher // nil: the system has no events
	log    *zap.Logger
	names  map[string]bool // files and symlinks whose events matter
	dirs   map[string]bool // directories that are watched, or missing
}

// watchFiles watches the directories of the files, and of every symlink on the way to the files. It
// stops watching all other directories.
func (w *watcher) watchFiles(list []string) {
	w.names = map[string]bool{}
	for _, file := range list {
		for _, name := range resolutionPaths(file) {
			w.names[name] = true
		}
	}
	if w.notify == nil { // the system has no events
		return
	}
	wanted := map[string]bool{}
	for name := range w.names {
		wanted[filepath.Dir(name)] = true
	}
	for dir := range w.dirs {
		if !wanted[dir] {
			_ = w.notify.Remove(dir) // an error means that the directory is gone, and its watch with it
			delete(w.dirs, dir)
		}
	}
	for dir := range wanted { // add again each time, because a directory may have been replaced by another of the same name
		err := w.notify.Add(dir)
		isMissing := os.IsNotExist(err) // this is no fault: a later call watches the directory when it exists
		if err != nil && !isMissing {
			w.log.Debug("a directory cannot be watched, so the proxy looks at it from time to time", zap.String("dir", dir), zap.Error(err))
			continue
		}
		w.dirs[dir] = true // also if it is missing; a call that removes it then fails, which does no harm
	}
}

// maxLinks bounds the symlinks on one path, as Linux does.
const maxLinks = 40

// resolutionPaths returns the paths that decide which file a path names: every symlink on the way,
// and the file itself. It returns nil if the path is relative to a working directory that is gone.
func resolutionPaths(path string) (names []string) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil
	}
	resolved, unresolved := "/", strings.Split(path, "/") // unresolved: elements of the path that are still to be resolved
	for links := 0; len(unresolved) > 0; {
		next := filepath.Join(resolved, unresolved[0])
		unresolved = unresolved[1:]
		target, err := os.Readlink(next)
		if err != nil || links == maxLinks { // an error means that next is no symlink, or does not exist
			resolved = next
			continue
		}
		links++
		names = append(names, next)
		if filepath.IsAbs(target) { // else the target is relative to the directory of the symlink
			resolved = "/"
		}
		unresolved = append(strings.Split(target, "/"), unresolved...)
	}
	return append(names, resolved)
}
