package main

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// streams are what a subcommand writes to: results to out, progress to err.
type streams struct {
	out, err io.Writer
}

// errFailed ends with exit status 1 when everything was said already.
var errFailed = errors.New("failed")

// usageError is a command line that parses and cannot be meant.
type usageError struct{ error }

// writeJSON writes one document for programs, and people who look at it.
func writeJSON(w io.Writer, document any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(document)
}

// relativeTo says where a file was looked for that is not there.
func relativeTo(err error) string {
	var at *fs.PathError
	if !errors.As(err, &at) || !errors.Is(at, fs.ErrNotExist) || filepath.IsAbs(at.Path) {
		return ""
	}
	dir, err := os.Getwd()
	if err != nil {
		return ""
	}
	return "; the path is relative to the working directory, " + dir
}
