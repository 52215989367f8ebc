// Package recorder asks real engines everything that evenkeel reads, and writes what they answer
// into the files of package recording.
package recorder

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"evenkeel/bench/rigs/real/recording"
	"evenkeel/mooncake"
)

// Engines are running engines of one version, with the same model. Plain alone may be recorded, or
// the other two without it.
type Engines struct {
	Plain, Prefill, Decode string // host:port; empty: not recorded
	Events, Replay         string // host:port of the prefill engine's KV events
	ModelPath              string // where the model lies on this machine; it does not go into the files
}

const (
	answerTime = 3 * time.Minute
	leaseTime  = 33 * time.Second // a hand-off of vLLM 0.32 is kept for 30 s
)

// recorder writes one file after the other and stops at the first failure.
type recorder struct {
	Engines
	dir   string
	out   io.Writer
	scrub *strings.Replacer
	err   error
}

// Record asks the engines everything and writes what they answer into dir. Files of engines that
// were not given stay.
func Record(ctx context.Context, e Engines, dir string, out io.Writer) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	r := &recorder{Engines: e, dir: dir, out: out}
	r.scrub = strings.NewReplacer(e.ModelPath, "/models/tiny")
	if e.Plain != "" {
		r.plain(ctx)
	}
	if e.Prefill != "" && e.Decode != "" {
		r.pair(ctx)
	}
	return r.err
}

func (r *recorder) address(engine string) string {
	return map[string]string{"plain": r.Plain, "prefill": r.Prefill, "decode": r.Decode}[engine]
}

// ask records one answer. A limit above 0 has the client leave after so many pieces.
func (r *recorder) ask(ctx context.Context, engine string, rec recording.Recording, limit int) *recording.Recording {
	if r.err != nil {
		return &rec
	}
	rec.Engine = engine
	if rec.Ask.Method == "" {
		rec.Ask.Method = http.MethodPost
	}
	if rec.Ask.Method == http.MethodPost {
		rec.Ask.ID = rec.Name
	}
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	if err := fetch(ctx, &rec, r.address(engine), limit); err != nil {
		r.err = fmt.Errorf("recording %s: %w", rec.Name, err)
		return &rec
	}
	kept := rec
	clean(&kept, r.scrub)
	r.err = save(r.dir, rec.Name+".json", &kept)
	fmt.Fprintf(r.out, "%-45s %d, %d pieces, %s\n", rec.Name, rec.Status, len(rec.Pieces), rec.End)
	return &rec
}

// fetch sends the request on a connection of its own, so that the head is seen as it came.
func fetch(ctx context.Context, rec *recording.Recording, address string, limit int) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	req, err := http.NewRequestWithContext(ctx, rec.Ask.Method, "http://engine"+rec.Ask.Path, strings.NewReader(rec.Ask.Body))
	if err != nil {
		return err
	}
	if rec.Ask.Method == http.MethodPost {
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Request-Id", rec.Ask.ID)
	}
	if err := req.Write(conn); err != nil {
		return err
	}
	br := bufio.NewReaderSize(conn, 1<<20)
	var head bytes.Buffer
	for {
		line, err := br.ReadString('\n')
		if err != nil {
			return fmt.Errorf("head: %w", err)
		}
		head.WriteString(line)
		if line = strings.TrimRight(line, "\r\n"); line == "" {
			break
		} else if !strings.HasPrefix(line, "HTTP/") {
			rec.Head = append(rec.Head, line)
		}
	}
	resp, err := http.ReadResponse(bufio.NewReaderSize(io.MultiReader(&head, br), 1<<20), req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	rec.Status, rec.End, rec.Pieces = resp.StatusCode, recording.Left, []string{}
	buf, held := make([]byte, 1<<20), ""
	for limit == 0 || len(rec.Pieces) < limit {
		n, err := resp.Body.Read(buf)
		held += string(buf[:n])
		if utf8.ValidString(held) && held != "" { // else a rune was cut: JSON cannot hold half of one
			rec.Pieces, held = append(rec.Pieces, held), ""
		}
		if errors.Is(err, io.EOF) {
			rec.End = recording.Whole
			break
		}
		if err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			rec.End = recording.Cut
			break
		}
	}
	return nil
}

// clean takes out what tells of this machine.
func clean(rec *recording.Recording, scrub *strings.Replacer) {
	pieces := make([]string, len(rec.Pieces))
	total := 0
	for i, p := range rec.Pieces {
		pieces[i] = scrub.Replace(p)
		total += len(pieces[i])
	}
	rec.Pieces = pieces
	head := make([]string, len(rec.Head))
	for i, line := range rec.Head {
		if rec.Header("Content-Length") != "" && strings.HasPrefix(strings.ToLower(line), "content-length:") {
			line = line[:len("content-length:")] + " " + strconv.Itoa(total)
		}
		head[i] = line
	}
	rec.Head = head
}

// both records a request as it is and with a stream.
func (r *recorder) both(ctx context.Context, engine, name, path, about, body string) {
	r.ask(ctx, engine, recording.Recording{Name: name, About: about, Ask: recording.Request{Path: path, Body: body}}, 0)
	body = strings.TrimSuffix(body, "}") + `,"stream":true,"stream_options":{"include_usage":true}}`
	r.ask(ctx, engine,
		recording.Recording{Name: name + "-stream", About: about + ", streamed", Ask: recording.Request{Path: path, Body: body}}, 0)
}

// get records a page.
func (r *recorder) get(ctx context.Context, engine, name, path, about string) {
	r.ask(ctx, engine,
		recording.Recording{Name: engine + "-" + name, About: about, Ask: recording.Request{Method: http.MethodGet, Path: path}}, 0)
}

// running records the metrics page while requests run.
func (r *recorder) running(ctx context.Context, engine, body string) {
	if r.err != nil {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for range 3 {
		began := make(chan struct{})
		go func() {
			req, _ := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+r.address(engine)+"/v1/completions", strings.NewReader(body))
			req.Header.Set("Content-Type", "application/json")
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				close(began)
				return
			}
			_, _ = io.CopyN(io.Discard, resp.Body, 64)
			close(began)
			_, _ = io.Copy(io.Discard, resp.Body) // until the context ends
			_ = resp.Body.Close()
		}()
		<-began
	}
	for range 50 { // the gauges follow a step behind
		rec := r.ask(ctx, engine, recording.Recording{Name: engine + "-metrics-running", About: "the metrics while three requests run",
			Ask: recording.Request{Method: http.MethodGet, Path: "/metrics"}}, 0)
		if r.err != nil || bytes.Contains(rec.Body(), []byte(`vllm:num_requests_running{engine="0",model_name="tiny"} 3.0`)) {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	r.err = fmt.Errorf("recording: the gauges of the %s engine never showed three running requests", engine)
}

// leg joins a body that evenkeel makes of a client's.
func leg(body string, build func(p *mooncake.Profile, b *mooncake.Body) [][]byte) (string, error) {
	b, err := mooncake.ScanBody([]byte(body), 0)
	if err != nil {
		return "", err
	}
	p := mooncake.Profile{Connector: mooncake.NIXLPull}.WithDefaults()
	return string(bytes.Join(build(&p, &b), nil)), nil
}

func endpoint(path string) mooncake.Endpoint {
	if path == mooncake.Chat.Path() {
		return mooncake.Chat
	}
	return mooncake.Completions
}

// probe records the prefill leg of a client's request, and returns its hand-off.
func (r *recorder) probe(ctx context.Context, name, path, about, client string) (kv json.RawMessage) {
	body, err := leg(client, func(p *mooncake.Profile, b *mooncake.Body) [][]byte {
		return p.ProbeBody(b, endpoint(path), nil, nil, nil)
	})
	if err != nil {
		r.err = errors.Join(r.err, err)
		return nil
	}
	rec := r.ask(ctx, "prefill",
		recording.Recording{Name: "prefill-" + name, About: about, Client: client, Ask: recording.Request{Path: path, Body: body}}, 0)
	var said struct {
		KV json.RawMessage `json:"kv_transfer_params"`
	}
	if r.err == nil && rec.Status == http.StatusOK {
		r.err = json.Unmarshal(rec.Body(), &said)
	}
	return said.KV
}

// decode records the decode leg with a hand-off.
func (r *recorder) decode(ctx context.Context, name, path, about, client string, kv json.RawMessage, stream bool) {
	body, err := leg(client, func(p *mooncake.Profile, b *mooncake.Body) [][]byte {
		return p.DecodeBody(b, endpoint(path), nil, kv, "", stream, nil)
	})
	if err != nil {
		r.err = errors.Join(r.err, err)
		return
	}
	r.ask(ctx, "decode",
		recording.Recording{Name: "decode-" + name, About: about, Client: client, Ask: recording.Request{Path: path, Body: body}}, 0)
}

// tokens is a list of n token ids that no other start has.
func tokens(n, start int) string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = strconv.Itoa(10 + (start*131+i*7+i*i%11)%900)
	}
	return "[" + strings.Join(ids, ",") + "]"
}

// saveEvents writes the KV events.
func (r *recorder) saveEvents(e *recording.Events) {
	if r.err == nil {
		r.err = save(r.dir, recording.KVEventsFile, e)
	}
}

func save(dir, name string, v any) error {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", " ")
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("recording %s: %w", name, err)
	}
	return os.WriteFile(filepath.Join(dir, name), out.Bytes(), 0o600)
}
