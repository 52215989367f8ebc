// Package vectors runs golden vectors against the code that serves, and answers
// `evenkeel decide`.
package vectors

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// vector is one line of a file.
type vector struct {
	Kind string          `json:"kind"`
	ID   string          `json:"id"`
	Note string          `json:"note"`
	In   json.RawMessage `json:"in"`
	Want json.RawMessage `json:"want"`
}

// Run runs the vectors of files, and of folders their *.jsonl. It writes a line
// for every failure and `N passed, N failed` at the end. A kind nobody answers
// and a line that is no vector are failures; err is a file that cannot be read
// or paths without a single vector.
func Run(paths []string, w io.Writer) (passed, failed int, err error) {
	files, err := filesOf(paths)
	if err != nil {
		return 0, 0, err
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return passed, failed, fmt.Errorf("vectors: %w", err)
		}
		lines := bufio.NewScanner(bytes.NewReader(data))
		lines.Buffer(nil, len(data)+1) // a line may be as long as the file
		for n := 1; lines.Scan(); n++ {
			line := bytes.TrimSpace(lines.Bytes())
			if len(line) == 0 {
				continue
			}
			if err := check(line); err != nil {
				failed++
				if _, err := fmt.Fprintf(w, "%s:%d: %v\n", file, n, err); err != nil {
					return passed, failed, err
				}
				continue
			}
			passed++
		}
		if err := lines.Err(); err != nil {
			return passed, failed, fmt.Errorf("vectors: %s: %w", file, err)
		}
	}
	if passed+failed == 0 {
		return 0, 0, fmt.Errorf("vectors: no vector in %v; name *.jsonl files or folders of them", paths)
	}
	_, err = fmt.Fprintf(w, "%d passed, %d failed\n", passed, failed)
	return passed, failed, err
}

// filesOf spreads folders into their *.jsonl, in name order.
func filesOf(paths []string) ([]string, error) {
	var files []string
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil {
			return nil, fmt.Errorf("vectors: %w", err)
		}
		if !info.IsDir() {
			files = append(files, path)
			continue
		}
		entries, err := os.ReadDir(path)
		if err != nil {
			return nil, fmt.Errorf("vectors: %w", err)
		}
		for _, e := range entries {
			if filepath.Ext(e.Name()) == ".jsonl" {
				files = append(files, filepath.Join(path, e.Name()))
			}
		}
	}
	return files, nil
}

// check runs one vector; the error names its kind and id.
func check(line []byte) error {
	var v vector
	if err := json.Unmarshal(line, &v); err != nil {
		return fmt.Errorf("not a vector: %w", err)
	}
	run, ok := kinds[v.Kind]
	if !ok {
		return fmt.Errorf("unknown kind %q (%s)", v.Kind, v.ID)
	}
	if err := run(v.In, v.Want); err != nil {
		return fmt.Errorf("%s %s: %w", v.Kind, v.ID, err)
	}
	return nil
}
