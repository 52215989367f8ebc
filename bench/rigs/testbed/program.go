package testbed

import (
	"context"
	"os"
	"sync"
)

// Program is the program under test, for all tests of a package. It is built when
// the first of them asks: to link it costs seconds of CPU each time.
type Program struct {
	once   sync.Once
	folder string
	binary string
	err    error
}

// Binary is the path of the program.
func (p *Program) Binary() (string, error) {
	p.once.Do(func() {
		if p.folder, p.err = os.MkdirTemp("", "evenkeel-program-"); p.err == nil {
			p.binary, p.err = build(context.Background(), "", p.folder, nil)
		}
	})
	return p.binary, p.err
}

// Remove deletes the program after the last test, if one was built.
func (p *Program) Remove() error { return os.RemoveAll(p.folder) }
