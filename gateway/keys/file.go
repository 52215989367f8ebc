package keys

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"

	"evenkeel/internal/smallfile"
	"evenkeel/internal/words"
)

// maxFile bounds a key file, in bytes. 16 MiB are about 100,000 keys.
const maxFile = 16 << 20

// Load reads a key file. An empty path means that no key is needed.
func Load(path string) (*Set, error) {
	if path == "" {
		return &Set{}, nil
	}
	src, err := smallfile.Read(path, maxFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("key file: %w; create it with `evenkeel keys new`, or leave keys_file empty to need no keys", err)
	case err != nil:
		return nil, fmt.Errorf("key file: %w", err)
	}
	return Parse(path, src)
}

// entry is one element of the list keys in the file. The package comment describes its fields.
type entry struct {
	Name          string `yaml:"name"`
	SHA256        string `yaml:"sha256"`
	Trusted       bool   `yaml:"trusted"`
	Priority      int    `yaml:"priority"`
	Batch         bool   `yaml:"batch"`
	MaxConcurrent int    `yaml:"max_concurrent"`
	RPM           int    `yaml:"rpm"`
	TPM           int    `yaml:"tpm"`
}

// Parse reads the contents of a key file; errors name path. A file without keys is refused, because
// it would lock out all callers.
func Parse(path string, src []byte) (*Set, error) {
	entries, lines, err := decode(src)
	if err != nil {
		return nil, fmt.Errorf("key file %s: %w", path, err)
	}
	if len(entries) == 0 {
		return nil, fmt.Errorf("key file %s: no keys; add one with `evenkeel keys new`, or leave keys_file empty to need none", path)
	}
	s := &Set{required: true}
	names := make(map[string]int, len(entries)) // index in entries by name, and below by hash
	hashes := make(map[[sha256.Size]byte]int, len(entries))
	for i, e := range entries {
		where := fmt.Sprintf("key file %s: entry %d", path, i+1)
		if i < len(lines) { // for an unusual layout, the lines are not known
			where = fmt.Sprintf("key file %s:%d", path, lines[i])
		}
		sum, err := e.check()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", where, err)
		}
		if earlier, isDuplicate := names[e.Name]; isDuplicate {
			return nil, fmt.Errorf("%s: name %q is that of key %d too; give each key its own", where, e.Name, earlier+1)
		}
		if earlier, isDuplicate := hashes[sum]; isDuplicate {
			return nil, fmt.Errorf("%s: %q has the sha256 of %q; remove one, or make a new key", where, e.Name, entries[earlier].Name)
		}
		names[e.Name], hashes[sum] = i, i
		k := Key{Name: e.Name, Trusted: e.Trusted, Priority: e.Priority, Batch: e.Batch, MaxConcurrent: e.MaxConcurrent, RPM: e.RPM, TPM: e.TPM,
			usage: new(usage)}
		s.hashes, s.keys = append(s.hashes, sum), append(s.keys, k)
	}
	return s, nil
}

// decode returns the entries, and the line on which each begins; lines is nil if they are not
// known. An empty file has no entries.
func decode(src []byte) (entries []entry, lines []int, err error) {
	defer func() {
		if v := recover(); v != nil { // goccy/go-yaml v1.19.2 panics if a tag stands in place of a list: "keys: !x y"
			entries, lines, err = nil, nil, errors.New("not valid YAML: keys must be a list of entries")
		}
	}()
	var file struct {
		Keys []entry `yaml:"keys"`
	}
	if err := yaml.NewDecoder(bytes.NewReader(src), yaml.Strict()).Decode(&file); err != nil && !errors.Is(err, io.EOF) {
		return nil, nil, redact(err)
	}
	return file.Keys, entryLines(src), nil
}

// check returns the entry's hash, or an error that says what is wrong with the entry.
func (e *entry) check() (sum [sha256.Size]byte, err error) {
	if e.Name == "" || strings.TrimSpace(e.Name) != e.Name {
		return sum, errors.New("a key needs a name that does not begin or end with a space; logs and metrics show it")
	}
	if !words.IsName(e.Name) {
		return sum, fmt.Errorf("%.40q is no name of a key; write up to %d bytes, all of printable characters", e.Name, words.MaxName)
	}
	raw, err := hex.DecodeString(e.SHA256)
	if err != nil || len(raw) != len(sum) {
		// The value is not quoted: it may be the key itself, pasted here.
		return sum, fmt.Errorf("%q: sha256 must be 64 hex digits, the SHA-256 of the key, not the key itself; `printf %%s \"$KEY\" | sha256sum` "+
			"prints it", e.Name)
	}
	for _, limit := range []struct {
		key string
		n   int
	}{{"max_concurrent", e.MaxConcurrent}, {"rpm", e.RPM}, {"tpm", e.TPM}} {
		if limit.n < 0 {
			return sum, fmt.Errorf("%q: %s is %d; use 0 for no limit", e.Name, limit.key, limit.n)
		}
	}
	if e.Priority < -MaxPriority || e.Priority > MaxPriority {
		return sum, fmt.Errorf("%q: priority is %d; use a number from %d to %d", e.Name, e.Priority, -MaxPriority, MaxPriority)
	}
	return [sha256.Size]byte(raw), nil
}

// entryLines returns the line on which each entry begins. For an unusual layout (anchors, several
// documents) it returns nothing. Errors then name the number of the entry instead of its line.
func entryLines(src []byte) []int {
	file, err := parser.ParseBytes(src, 0)
	if err != nil || len(file.Docs) != 1 {
		return nil
	}
	path, err := yaml.PathString("$.keys")
	if err != nil {
		return nil
	}
	node, err := path.FilterFile(file)
	if err != nil {
		return nil
	}
	seq, ok := node.(*ast.SequenceNode)
	if !ok {
		return nil
	}
	lines := make([]int, 0, len(seq.Values))
	for _, v := range seq.Values {
		lines = append(lines, v.GetToken().Position.Line)
	}
	return lines
}

// redact keeps the position and the reason of a YAML error, and drops the excerpt of the file. The
// excerpt may contain a key that was pasted by mistake, and a key must not reach the log.
func redact(err error) error {
	var yamlErr yaml.Error
	if !errors.As(err, &yamlErr) { // another error has no excerpt
		return err
	}
	pos := yamlErr.GetToken().Position
	return fmt.Errorf("line %d, column %d: %s; an entry has name, sha256, trusted, priority, batch, max_concurrent, rpm and tpm", pos.Line,
		pos.Column, yamlErr.GetMessage())
}
