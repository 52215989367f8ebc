// Package top shows a running proxy in a terminal: the live document of
// gateway/live, read from the admin listener over its stream.
package top

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
	"unicode"

	"evenkeel/gateway/live"
)

// Source is where a proxy's documents come from.
type Source struct {
	URL    string // of the admin listener
	Token  string // of admin.token_file; empty: none is asked for
	Client *http.Client
}

// maxDocument bounds one event: thousands of ranks fit.
const maxDocument = 16 << 20

func (s *Source) open(ctx context.Context, path string) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(s.URL, "/")+path, nil)
	if err != nil {
		return nil, err
	}
	if s.Token != "" {
		req.Header.Set("Authorization", "Bearer "+s.Token)
	}
	resp, err := s.Client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("%w; --admin is the address of evenkeel's admin listener (admin.listen)", err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp.Body, nil
	}
	defer func() { _ = resp.Body.Close() }()
	says, _ := io.ReadAll(io.LimitReader(resp.Body, 512))
	switch resp.StatusCode {
	case http.StatusUnauthorized:
		if s.Token != "" {
			return nil, fmt.Errorf("%s has another token (admin.token_file) than the one in --token-file", s.URL)
		}
		return nil, fmt.Errorf("%s asks for its token (admin.token_file); name the file with --token-file", s.URL)
	case http.StatusNotFound:
		return nil, fmt.Errorf("%s has no %s; --admin is the address of evenkeel's admin listener (admin.listen)", s.URL, path)
	}
	return nil, fmt.Errorf("%s answers %s: %s", s.URL, resp.Status, bytes.TrimSpace(says))
}

// Once asks for one document.
func (s *Source) Once(ctx context.Context) (*live.Document, error) {
	body, err := s.open(ctx, "/live?once")
	if err != nil {
		return nil, err
	}
	defer func() { _ = body.Close() }()
	text, err := io.ReadAll(io.LimitReader(body, maxDocument))
	if err != nil {
		return nil, err
	}
	return read(text)
}

// Watch hands every document to see until the stream ends, which is an error.
func (s *Source) Watch(ctx context.Context, see func(*live.Document)) error {
	body, err := s.open(ctx, "/live")
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	lines := bufio.NewScanner(body)
	lines.Buffer(make([]byte, 64<<10), maxDocument)
	name := ""
	for lines.Scan() {
		line := lines.Bytes()
		if event, ok := bytes.CutPrefix(line, []byte("event: ")); ok {
			name = string(event)
		} else if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok && name == "document" {
			d, err := read(data)
			if err != nil {
				return err
			}
			see(d)
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return io.ErrUnexpectedEOF
}

func read(text []byte) (*live.Document, error) {
	var words any
	d := &live.Document{}
	err := json.Unmarshal(text, &words)
	if err == nil {
		text, err = json.Marshal(harmless(words))
	}
	if err == nil {
		err = json.Unmarshal(text, d)
	}
	if err != nil {
		return nil, fmt.Errorf("the live document of the proxy cannot be read: %w", err)
	}
	if d.Form != live.Form {
		return nil, fmt.Errorf("the proxy, version %s, sends live documents of form %d, and this evenkeel reads form %d; use the same version as the proxy",
			d.Proxy.Version, d.Form, live.Form)
	}
	return d, nil
}

// again is how long a watcher waits before it asks anew.
const again = time.Second

// harmless cleans every string of a document: names of models, engines and
// requests come from outside.
func harmless(v any) any {
	switch v := v.(type) {
	case string:
		return clean(v)
	case []any:
		for i := range v {
			v[i] = harmless(v[i])
		}
	case map[string]any:
		for k := range v {
			v[k] = harmless(v[k])
		}
	}
	return v
}

// clean takes out what would speak to the terminal.
func clean(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || unicode.Is(unicode.Cf, r) {
			return '\uFFFD'
		}
		return r
	}, text)
}
