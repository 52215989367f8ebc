package trace

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
)

// Lines are those of a text that may be gzipped.
type Lines struct {
	Name string // what errors call the text
	Most int    // bytes of a line
	What string // a question for who gave a text whose lines are longer
}

// Each gives each line that is not empty to take, with its number and without white
// space around it; whole says that a newline ended it. It stops once there shall be no
// more, and returns the number of the last line.
func (l Lines) Each(r io.Reader, take func(n int, line []byte, whole bool) (more bool, err error)) (n int, err error) {
	br := bufio.NewReaderSize(r, 64<<10)
	if magic, err := br.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
		z, err := gzip.NewReader(br)
		if err != nil {
			return 0, fmt.Errorf("%s: %w; the file is damaged, or not gzip", l.Name, err)
		}
		br = bufio.NewReaderSize(z, 64<<10)
	}
	whole := false
	sc := bufio.NewScanner(br)
	sc.Buffer(make([]byte, 0, 64<<10), l.Most)
	sc.Split(func(data []byte, atEOF bool) (int, []byte, error) {
		advance, token, err := bufio.ScanLines(data, atEOF)
		whole = advance > 0 && data[advance-1] == '\n'
		return advance, token, err
	})
	for sc.Scan() {
		n++
		line := bytes.TrimSpace(sc.Bytes())
		if len(line) == 0 {
			continue
		}
		if more, err := take(n, line, whole); err != nil {
			return n, fmt.Errorf("%s:%d: %w", l.Name, n, err)
		} else if !more {
			return n, nil
		}
	}
	switch err := sc.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return n, fmt.Errorf("%s:%d: line longer than %d bytes; %s", l.Name, n+1, l.Most, l.What)
	case err != nil:
		return n, fmt.Errorf("%s:%d: %w", l.Name, n+1, err)
	}
	return n, nil
}
