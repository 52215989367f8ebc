package reload

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/gateway/config"
)

// Warning is what a proxy would say in its log when it starts.
type Warning struct {
	Key string // of the config; empty: it is about more than one
	Msg string
}

// Check returns the errors that would end a start with a config, and the warnings that
// it would log. start does what a start does, up to the first socket. Check leaves no
// trace: the files that a proxy writes are opened and left as they were.
func Check(cfg *config.Config, start func(*config.Config, *zap.Logger) error) ([]Warning, error) {
	err := errors.Join(
		keyed("log.requests", writable(cfg.Log.Requests)),
		keyed("dispatch.log.file", writable(cfg.Dispatch.DecisionLog.File)),
	)
	silent := *cfg
	silent.Log.Requests, silent.Dispatch.DecisionLog.File = "", ""
	core, said := observer.New(zap.WarnLevel)
	wrong := start(&silent, zap.New(core))
	var warnings []Warning
	for _, entry := range said.All() {
		warnings = append(warnings, warningOf(entry))
	}
	return warnings, errors.Join(err, wrong)
}

func keyed(key string, err error) error {
	if err != nil {
		err = fmt.Errorf("%s: %w", key, err)
	}
	return err
}

// writable tells whether a file can be appended to, or made, and leaves no file
// behind that was not there.
func writable(path string) error {
	if path == "" || path == "-" {
		return nil
	}
	if info, err := os.Stat(path); err == nil && info.Mode()&fs.ModeNamedPipe != 0 {
		return nil // to open it would wait for its reader
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o640)
	if err == nil {
		return errors.Join(f.Close(), os.Remove(path))
	}
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	if f, err = os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0); err != nil {
		return err
	}
	return f.Close()
}

// keyField names the key of the config that a warning is about.
const keyField = "key"

// warningOf writes a line of the log as one text.
func warningOf(entry observer.LoggedEntry) Warning {
	w := Warning{Msg: entry.Message}
	values := entry.ContextMap()
	var more []string
	for _, f := range entry.Context {
		if f.Key == keyField && f.Type == zapcore.StringType {
			w.Key = f.String
		} else if value, ok := values[f.Key]; ok {
			more = append(more, fmt.Sprintf("%s: %v", f.Key, value))
		}
	}
	if len(more) > 0 {
		w.Msg += " (" + strings.Join(more, ", ") + ")"
	}
	return w
}
