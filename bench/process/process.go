// Package process runs the programs that a benchmark or a test of endurance is
// about.
package process

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"time"
)

// Process is a program that was started. Its error is set once Gone is closed.
type Process struct {
	*os.Process
	gone chan struct{}
	err  error
}

// Start starts a command that writes to the end of a log file.
func Start(cmd *exec.Cmd, log string) (*Process, error) {
	file, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	cmd.Stdout, cmd.Stderr = file, file
	err = cmd.Start()
	_ = file.Close() // the process has its own
	if err != nil {
		return nil, err
	}
	p := &Process{Process: cmd.Process, gone: make(chan struct{})}
	go func() {
		defer close(p.gone)
		p.err = cmd.Wait()
	}()
	return p, nil
}

// patience of Answers.
const patience = 30 * time.Second

// Answers waits until the process answers 200 at a URL.
func (p *Process) Answers(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		if resp, err := http.DefaultClient.Do(req); err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-p.gone:
			return fmt.Errorf("the process that should answer %s ended: %w", url, cmp.Or(p.err, errEnded))
		case <-ctx.Done():
			return fmt.Errorf("%s does not answer: %w", url, ctx.Err())
		}
	}
}

var errEnded = errors.New("with status 0")

// Gone is closed when the process has ended.
func (p *Process) Gone() <-chan struct{} { return p.gone }

// Err is how it ended. Ask once Gone is closed.
func (p *Process) Err() error { return p.err }

// Kill is SIGKILL, and returns once the process is gone. Nil was never started.
func (p *Process) Kill() {
	if p != nil {
		_ = p.Process.Kill() // an error: it has ended
		<-p.gone
	}
}

// FreePort names a port nobody listened on a moment ago.
func FreePort() string {
	_, port, _ := net.SplitHostPort(FreeAddresses(1)[0]) // it came from a listener
	return port
}

// FreeAddresses are addresses of the loopback interface that nobody listened on a
// moment ago, none twice. Where no port can be had, they have port 0.
func FreeAddresses(n int) (list []string) {
	for range n {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			list = append(list, "127.0.0.1:0")
			continue
		}
		defer func() { _ = ln.Close() }()
		list = append(list, ln.Addr().String())
	}
	return list
}
