// Package smallfile reads files that should be small, so that a path to a huge or endless file
// cannot fill the memory.
package smallfile

import (
	"fmt"
	"io"
	"os"
)

// Read returns the content of a file.
func Read(path string, maxBytes int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	// one more, to notice that the file is larger
	text, err := io.ReadAll(io.LimitReader(f, maxBytes+1))
	if err == nil && int64(len(text)) > maxBytes {
		return nil, fmt.Errorf("%s: larger than %d bytes; is it the right file?", path, maxBytes)
	}
	return text, err
}
