// Package logfile opens a log to which a process appends lines.
package logfile

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

// Open opens a log for appending, and makes it if there is none. It does not wait for the reader of a named pipe: the pipe is opened for
// reading, too, so that lines wait in it until a reader comes. A process that may only write to the pipe needs a reader that is there
// already. A link to a pipe, such as /dev/stdout, is not treated so, because whoever made that pipe reads it.
func Open(path string) (*os.File, error) {
	info, err := os.Lstat(path)
	if err != nil || info.Mode()&fs.ModeNamedPipe == 0 {
		return os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o640)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrPermission) {
		return os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK, 0)
	}
	return f, err
}
