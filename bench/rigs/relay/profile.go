//go:build linux

package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/tools/page"
)

// Cost is what a share of a proxy's CPU time was for.
type Cost struct {
	For   string
	Share float64
}

func (c Cost) String() string { return fmt.Sprintf("%s %.0f %%", c.For, 100*c.Share) }

// costs say what a sample is for: the row that has the innermost function of its stack that any row has.
var costs = []cost{
	{"reading sockets", []string{"evenkeel/socket.Read", "evenkeel/socket.Socket.Read", "syscall.read", "unix.Read", "syscall.recvfrom"}},
	{"writing to sockets", []string{
		"evenkeel/socket.Write", "evenkeel/socket.writev", "evenkeel/socket.Socket.Write",
		"evenkeel/socket.Socket.Ask", "syscall.write", "syscall.writev", "syscall.sendto", "syscall.sendmsg",
		"unix.Writev", "internal/poll.(*FD).Writev",
	}},
	{"opening, closing and setting sockets", []string{
		"syscall.close", "syscall.socket", "syscall.accept4", "syscall.connect", "syscall.setsockopt",
		"syscall.shutdown", "syscall.fcntl", "unix.EpollCtl", "unix.fcntl",
	}},
	{"asking which sockets have bytes", []string{"runtime.netpoll", "EpollWait"}},
	{"memory", []string{
		"runtime.gcBgMarkWorker", "runtime.mallocgc", "runtime.bgsweep", "runtime.bgscavenge",
		"runtime.gcAssistAlloc",
	}},
	{"goroutines: waking, parking, choosing", []string{
		"runtime.mcall", "runtime.schedule", "runtime.ready", "runtime.futex", "runtime.park_m", "runtime.goready",
		"runtime.wakep", "runtime.mstart", "runtime.newproc",
	}},
	{"events: reading and counting", []string{"evenkeel/sse."}},
	{"streams: the loop and the pump", []string{"evenkeel/gateway/loop.", "evenkeel/gateway/pump."}},
	{"HTTP of clients", []string{"github.com/valyala/fasthttp", "evenkeel/gateway/edge."}},
	{"HTTP of engines", []string{"evenkeel/engine."}},
	{"dispatcher and prefill tier", []string{"evenkeel/dispatcher", "evenkeel/prefill", "evenkeel/pool."}},
	{"requests, receipts, metrics", []string{"evenkeel/gateway", "github.com/prometheus"}},
}

// A cost is a part of the CPU time, and the functions that it is spent in: the beginnings or ends of their names.
type cost struct {
	what      string
	functions []string
}

// profile asks a proxy for a profile of its CPU time.
func (p *proxy) profile(ctx context.Context, w *testbed.World, window time.Duration) ([]Cost, error) {
	at := strings.TrimSuffix(p.ready, "/readyz") + "/debug/pprof/profile?seconds=" + strconv.Itoa(max(1, int(window.Seconds())))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("profile: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("profile: status %d, %w", resp.StatusCode, err)
	}
	file := w.File("profile")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return nil, err
	}
	stacks, err := exec.CommandContext(ctx, "go", "tool", "pprof", "-traces", "-unit", "us", file).Output()
	if err != nil {
		return nil, fmt.Errorf("go tool pprof: %w", err)
	}
	return costsOf(stacks), nil
}

// costsOf reads the stacks that pprof prints: lines of dashes between them, the time before the innermost function.
func costsOf(stacks []byte) (list []Cost) {
	sums, sum := map[string]float64{}, 0.0
	var stack []string
	took := 0.0
	end := func() {
		if len(stack) > 0 {
			sums[costOf(stack)] += took
			sum += took
		}
		stack, took = nil, 0
	}
	lines := bufio.NewScanner(bytes.NewReader(stacks))
	begun := false
	for lines.Scan() {
		line := lines.Text()
		switch fields := strings.Fields(line); {
		case strings.HasPrefix(line, "-----------+"):
			end()
			begun = true
		case !begun || len(fields) == 0:
		case stack == nil:
			us, err := strconv.ParseFloat(strings.TrimSuffix(fields[0], "us"), 64)
			if err != nil || len(fields) < 2 { // a label
				continue
			}
			took, stack = us, fields[1:2]
		default:
			stack = append(stack, fields[0])
		}
	}
	end()
	for _, what := range slices.Sorted(maps.Keys(sums)) {
		list = append(list, Cost{what, sums[what] / sum})
	}
	slices.SortStableFunc(list, func(a, b Cost) int { return cmp.Compare(b.Share, a.Share) })
	return list
}

// costOf says what a stack is for.
func costOf(stack []string) string {
	for _, f := range stack { // the innermost one first
		for _, c := range costs {
			for _, name := range c.functions {
				if strings.HasPrefix(f, name) || strings.HasSuffix(f, name) {
					return c.what
				}
			}
		}
	}
	return "the rest"
}

func (s *store) writeProfiles(out io.Writer) {
	t := page.Markdown{Head: []string{"part of evenkeel's CPU time"}}
	var missed []row
	for _, r := range rows {
		if s.misses(r.name) && s.Profiles[r.name] != nil {
			missed = append(missed, r)
			t.Head = append(t.Head, r.title())
		}
	}
	if len(missed) == 0 {
		return
	}
	for _, c := range append(slices.Clone(costs), cost{what: "the rest"}) {
		cells := []string{c.what}
		for _, r := range missed {
			i := slices.IndexFunc(s.Profiles[r.name], func(is Cost) bool { return is.For == c.what })
			cells = append(cells, cell(i >= 0, "%.0f %%", 100*s.Profiles[r.name][max(0, i)].Share))
		}
		t.Add(cells...)
	}
	fmt.Fprintf(out, "\n## Where the time goes in the rows that miss their aim\n\n%v\n"+
		"Each is a profile of one more measurement, of evenkeel %s, which is in no other figure. A sample of it\n"+
		"counts for the part that has its innermost function.\n", &t, s.Peers[evenkeelName].Version)
}
