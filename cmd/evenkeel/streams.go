package main

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// streams are the outputs of a subcommand: results go to out, progress and messages to err.
type streams struct {
	out, err io.Writer
}

// errFailed makes the program end with status 1 without a message. It is for a subcommand that has
// already printed the reason.
var errFailed = errors.New("failed")

// usageError is an error of a command line that can be parsed but makes no sense. The program then
// ends with status 2.
type usageError struct{ error }

// writeJSON writes one JSON document, indented by two spaces.
func writeJSON(w io.Writer, document any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(document)
}

// relativePathHint returns a hint to append to the text of err, which names the working directory,
// if err is about a missing file with a relative path; empty: err is about something else.
func relativePathHint(err error) string {
	var pathErr *fs.PathError
	if !errors.As(err, &pathErr) || !errors.Is(pathErr, fs.ErrNotExist) || filepath.IsAbs(pathErr.Path) {
		return ""
	}
	dir, err := os.Getwd()
	if err != nil {
		return ""
	}
	return "; the path is relative to the working directory, " + dir
}
