package testbed

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
)

// Answer is what a server said.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// Do asks a server, with pairs of header fields, and reads its whole answer. A body
// is JSON; nil is none.
func Do(ctx context.Context, client *http.Client, method, url string, body []byte, header ...string) (a Answer, err error) {
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return a, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := client.Do(req)
	if err != nil {
		return a, err
	}
	defer func() { _ = resp.Body.Close() }()
	a = Answer{Status: resp.StatusCode, Header: resp.Header}
	a.Body, err = io.ReadAll(resp.Body)
	return a, err
}

// Admin is a listener that tells of its process, such as a proxy's admin listener
// or the address of an engine.
type Admin struct {
	Address string // host:port
	Token   string // empty: it wants none
	Client  *http.Client
}

// Ask sends a request with a JSON body, or without one if it is nil.
func (a Admin) Ask(method, path string, body any) (status int, answer []byte, err error) {
	var text []byte
	if body != nil {
		if text, err = json.Marshal(body); err != nil {
			return 0, nil, err
		}
	}
	var header []string
	if a.Token != "" {
		header = []string{"Authorization", "Bearer " + a.Token}
	}
	got, err := Do(context.Background(), a.Client, method, "http://"+a.Address+path, text, header...)
	return got.Status, got.Body, err
}

// Read reads a JSON document into v, and says whether it came.
func (a Admin) Read(path string, v any) bool {
	_, text, err := a.Ask(http.MethodGet, path, nil)
	return err == nil && json.Unmarshal(text, v) == nil
}

// IsReady says whether its proxy is ready now.
func (a Admin) IsReady() bool {
	status, _, err := a.Ask(http.MethodGet, "/readyz", nil)
	return err == nil && status == http.StatusOK
}

// Page is what /metrics says.
func (a Admin) Page() ([]byte, error) {
	status, page, err := a.Ask(http.MethodGet, "/metrics", nil)
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("%s/metrics answered %d", a.Address, status)
	}
	return page, err
}

// Series is what /metrics says: name and labels to value.
func (a Admin) Series() (map[string]float64, error) {
	page, err := a.Page()
	return Series(page), err
}

// Held lists what its proxy still holds, by Books.
func (a Admin) Held(who string) []string {
	all, err := a.Series()
	if err != nil {
		return []string{err.Error()}
	}
	return Held(who, all, Books...)
}

// Metric sums the series of /metrics whose names begin so; 0 if nobody answers.
func (a Admin) Metric(prefix string) float64 {
	page, _ := a.Page() // an error page has no series
	return Sum(page, prefix)
}

// InUse is how many bytes the proxy's last collection of garbage left, by its own metrics. The next
// collection is due when they have doubled, and stacks count once.
func (a Admin) InUse() (int64, error) {
	all, err := a.Series()
	if err != nil {
		return 0, err
	}
	next, there := all["go_memstats_next_gc_bytes"]
	stacks, too := all["go_memstats_stack_inuse_bytes"]
	if !there || !too {
		return 0, errors.New("its metrics do not say how much memory it has in use")
	}
	return int64((next + stacks) / 2), nil
}
