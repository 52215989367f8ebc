// Package logfile opens logs for appending, and writes whole lines to them.
package logfile

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"syscall"
)

// Open opens a log for appending, or makes it. A named pipe is opened for reading and writing, so
// that it need not wait for a reader: lines wait in the pipe. If the process may only write to the
// pipe, Open fails without a reader. A link to a pipe, such as /dev/stdout, is opened like a file,
// because such a pipe has a reader already.
func Open(path string) (*os.File, error) {
	info, err := os.Lstat(path)
	isPipe := err == nil && info.Mode()&fs.ModeNamedPipe != 0
	if !isPipe {
		return os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o640)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	// O_NONBLOCK makes the call fail where it would wait for a reader
	if errors.Is(err, fs.ErrPermission) {
		return os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK, 0)
	}
	return f, err
}

// A Writer writes lines. A log may end with a part of a line, because a write failed or a process
// died; then a line end comes first.
type Writer struct {
	Log         io.Writer
	EndsMidLine bool
}

// WriteLine writes a line, which has its line end, in one write, so that the lines of two processes
// do not mix.
func (w *Writer) WriteLine(line []byte) (n int, err error) {
	if w.EndsMidLine {
		line = append([]byte{'\n'}, line...)
	}
	if n, err = w.Log.Write(line); n > 0 { // even a write that fails may have written a part
		w.EndsMidLine = line[n-1] != '\n'
	}
	return n, err
}

// Rest returns the part of a line with which a log ends: where it begins, and up to 64 KiB of it.
// rest is empty if there is none, or the log cannot be read or is no regular file.
func Rest(path string) (begin int64, rest []byte) {
	info, err := os.Stat(path)
	if err != nil || !info.Mode().IsRegular() {
		return 0, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return 0, nil
	}
	defer func() { _ = f.Close() }()
	buf, size := make([]byte, 64<<10), info.Size()
	for end := size; end > 0; end = begin { // backwards from the end
		begin = max(0, end-int64(len(buf)))
		piece := buf[:end-begin]
		if _, err := f.ReadAt(piece, begin); err != nil {
			return 0, nil
		}
		if i := bytes.LastIndexByte(piece, '\n'); i >= 0 {
			begin += int64(i) + 1
			break
		}
	}
	rest = buf[:min(size-begin, int64(len(buf)))]
	if _, err := f.ReadAt(rest, begin); err != nil {
		return 0, nil
	}
	return begin, rest
}
