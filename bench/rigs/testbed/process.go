package testbed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"evenkeel/bench/lab/refengine/heldport"
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

// patience is how long a proxy may take to be ready.
const patience = 30 * time.Second

// asker keeps no connections, and waits for no answer for long: a program that
// starts may take one and forget it.
var asker = &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

// Answers waits until the process answers 200 at a URL.
func (p *Process) Answers(ctx context.Context, limit time.Duration, url string) error {
	err := Await(ctx, limit, url+" answers", func() bool {
		got, err := Do(ctx, asker, http.MethodGet, url, nil)
		return err == nil && got.Status == http.StatusOK || !p.Running()
	})
	if !p.Running() {
		return fmt.Errorf("the process that should answer %s ended: %w", url, cmp.Or(p.err, errEnded))
	}
	return err
}

var errEnded = errors.New("with status 0")

// Gone is closed when the process has ended.
func (p *Process) Gone() <-chan struct{} { return p.gone }

// Err is how it ended. Ask once Gone is closed.
func (p *Process) Err() error { return p.err }

// Running says whether it was started and has not ended.
func (p *Process) Running() bool {
	if p == nil {
		return false
	}
	select {
	case <-p.gone:
		return false
	default:
		return true
	}
}

// End sends SIGTERM and waits for so long. It fails if the process still runs then,
// or ended as it should not.
func (p *Process) End(limit time.Duration) error {
	_ = p.Signal(syscall.SIGTERM) // an error: it has ended
	select {
	case <-p.gone:
		if p.err != nil {
			return fmt.Errorf("it ended with %w; its log says why", p.err)
		}
		return nil
	case <-time.After(limit):
		return fmt.Errorf("it has not ended %v after SIGTERM", limit)
	}
}

// Kill is SIGKILL, and returns once the process is gone. Nil was never started.
func (p *Process) Kill() {
	if p != nil {
		_ = p.Process.Kill() // an error: it has ended
		<-p.gone
	}
}

// heldPorts are the ports that FreeAddresses has given out. Their files are kept,
// for a file that nobody knows is closed by the collector.
var heldPorts struct {
	sync.Mutex
	files []*os.File
}

// FreeAddresses are addresses of the loopback interface at which nobody listens,
// none twice. On Linux the kernel gives them to nobody else while this process
// lives; elsewhere they were free a moment ago. Where no port can be had, they have
// port 0.
func FreeAddresses(n int) (list []string) {
	heldPorts.Lock()
	defer heldPorts.Unlock()
	for range n {
		addr, held, err := heldport.Reserve("127.0.0.1:0")
		switch {
		case err != nil:
			addr = "127.0.0.1:0"
		case held != nil:
			heldPorts.files = append(heldPorts.files, held)
		default:
			if ln, err := net.Listen("tcp", addr); err == nil {
				defer func() { _ = ln.Close() }()
				addr = ln.Addr().String()
			}
		}
		list = append(list, addr)
	}
	return list
}
