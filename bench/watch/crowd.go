package main

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"evenkeel/bench/refengine"
)

const (
	openings = 600             // clients that come in a second
	silence  = 8 * time.Second // a step of the idle engine: a stream begins within two
	patience = 3 * time.Minute // until all are there
)

// crowd is the process of a proxy's idle clients and their engines, whose URLs
// are its first line. It reads two commands: open, and count, which it answers
// with the number of clients that have what they came for and are still
// connected, once that is all of them or patience is over.
func crowd(args []string, in io.Reader, out io.Writer) error {
	flags := flag.NewFlagSet("crowd", flag.ContinueOnError)
	address := flags.String("proxy", "", "its address for clients")
	streams := flags.Int("streams", 0, "clients with a stream that hardly says anything")
	connections := flags.Int("connections", 0, "clients with a connection that waits for its next request")
	if err := flags.Parse(args); err != nil {
		return err
	}
	prefill, err := refengine.Start(refengine.Config{Role: refengine.Prefill, Model: idleModel, PrefillBase: time.Nanosecond, PrefillPerToken: time.Nanosecond,
		PrefillConcurrency: 64, KVTokens: 8 << 20})
	if err != nil {
		return err
	}
	defer prefill.Close()
	// A token every few seconds and not none: of tens of thousands of connections
	// without traffic the kernel sends the keep-alive probes at the same moment, and
	// on loopback, whose queue holds 1,000 packets, most of them are lost.
	decode, err := refengine.Start(refengine.Config{Role: refengine.Decode, Model: idleModel, Slots: max(*streams, 1), KVTokens: 64 << 20, C0: silence, C1: time.Nanosecond})
	if err != nil {
		return err
	}
	defer decode.Close()
	fmt.Fprintln(out, prefill.URLs()[0], decode.URLs()[0])
	c := idlers{address: *address}
	commands := bufio.NewScanner(in)
	for commands.Scan() {
		switch commands.Text() {
		case "open":
			c.open(*streams, *connections)
		case "count":
			fmt.Fprintln(out, c.count(*streams+*connections))
		}
	}
	return commands.Err()
}

// idlers are clients that are there and ask nothing.
type idlers struct {
	address string
	there   atomic.Int64
}

func (c *idlers) open(streams, connections int) {
	body := fmt.Sprintf(`{"model":%q,"stream":true,"max_tokens":100000,"prompt":"idle"}`, idleModel)
	stream := fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", c.address, len(body), body)
	models := fmt.Sprintf("GET /v1/models HTTP/1.1\r\nHost: %s\r\n\r\n", c.address)
	tick := time.NewTicker(time.Second / openings)
	defer tick.Stop()
	for i := range streams + connections {
		<-tick.C
		if i < streams {
			go c.idle(stream)
		} else {
			go c.stay(models)
		}
	}
}

// stay is a client that comes again when its kept-alive connection has ended.
func (c *idlers) stay(request string) {
	for c.idle(request) {
	}
}

// idle is a client that asks once, and counts from the answer until the
// connection ends. It says whether there was an answer.
func (c *idlers) idle(request string) bool {
	conn, err := net.Dial("tcp", c.address)
	if err != nil {
		return false
	}
	defer func() { _ = conn.Close() }()
	if _, err := io.WriteString(conn, request); err != nil {
		return false
	}
	buffer := make([]byte, 1024)
	n, err := conn.Read(buffer)
	if err != nil || !strings.HasPrefix(string(buffer[:n]), "HTTP/1.1 200 ") {
		return false
	}
	c.there.Add(1)
	defer c.there.Add(-1)
	for err == nil {
		_, err = conn.Read(buffer)
	}
	return true
}

func (c *idlers) count(all int) int64 {
	for end := time.Now().Add(patience); c.there.Load() < int64(all) && time.Now().Before(end); {
		time.Sleep(100 * time.Millisecond)
	}
	return c.there.Load()
}
