package reload

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/gateway/config"
)

// Warning is a warning that a proxy would log when it starts.
type Warning struct {
	Key string // the config key that the warning is about; empty: it is about several keys
	Msg string
}

// Check returns the errors that would make a start with the config fail, and the warnings that the
// start would log. The function start performs a start up to the first socket. Check changes no
// files: it opens the files that a proxy writes, but leaves them as they were.
func Check(cfg *config.Config, start func(*config.Config, *zap.Logger) error) ([]Warning, error) {
	err := errors.Join(
		withKey("log.requests", checkWritable(cfg.Log.Requests)),
		withKey("dispatch.log.file", checkWritable(cfg.Dispatch.DecisionLog.File)),
	)
	silent := *cfg
	silent.Log.Requests, silent.Dispatch.DecisionLog.File = "", ""
	core, logged := observer.New(zap.WarnLevel)
	startErr := start(&silent, zap.New(core))
	var warnings []Warning
	for _, entry := range logged.All() {
		warnings = append(warnings, warningOf(entry))
	}
	return warnings, errors.Join(err, startErr)
}

// withKey puts the config key that an error is about before the error; nil stays nil.
func withKey(key string, err error) error {
	if err != nil {
		err = fmt.Errorf("%s: %w", key, err)
	}
	return err
}

// checkWritable returns an error if a file can neither be appended to nor created. It removes a
// file that it had to create. Empty and "-" (stdout) are no files.
func checkWritable(path string) error {
	if path == "" || path == "-" {
		return nil
	}
	if info, err := os.Stat(path); err == nil && info.Mode()&fs.ModeNamedPipe != 0 {
		return nil // opening a named pipe would wait for a reader
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o640)
	if err == nil { // there was no file, and this call has created it
		return errors.Join(f.Close(), os.Remove(path))
	}
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	f, err = os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if errors.Is(err, fs.ErrNotExist) { // the path is a symlink to a file that does not exist yet, which a proxy would create
		to, linkErr := os.Readlink(path)
		if linkErr != nil {
			return err
		}
		if !filepath.IsAbs(to) {
			to = filepath.Dir(path) + "/" + to // not filepath.Join, which would remove a symlink before ..
		}
		return checkWritable(to)
	}
	if err != nil {
		return err
	}
	return f.Close()
}

// keyField is the log field with the config key that a warning is about.
const keyField = "key"

// warningOf turns a log line into a warning, with the fields of the line in the text.
func warningOf(entry observer.LoggedEntry) Warning {
	w := Warning{Msg: entry.Message}
	values := entry.ContextMap()
	var details []string
	for _, f := range entry.Context {
		if f.Key == keyField && f.Type == zapcore.StringType {
			w.Key = f.String
		} else if value, ok := values[f.Key]; ok { // a field without a value (zap.Skip) is left out
			details = append(details, fmt.Sprintf("%s: %v", f.Key, value))
		}
	}
	if len(details) > 0 {
		w.Msg += " (" + strings.Join(details, ", ") + ")"
	}
	return w
}
