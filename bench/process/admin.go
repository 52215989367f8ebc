package process

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
)

// Admin is a listener that tells of its process, such as a proxy's admin listener
// or the address of an engine.
type Admin struct {
	Address string // host:port
	Token   string // empty: it wants none
	Client  *http.Client
}

// Ask sends a request with a JSON body, or without one if it is nil.
func (a Admin) Ask(method, path string, body any) (status int, answer []byte, err error) {
	var text io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return 0, nil, err
		}
		text = bytes.NewReader(b)
	}
	req, err := http.NewRequest(method, "http://"+a.Address+path, text)
	if err != nil {
		return 0, nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if a.Token != "" {
		req.Header.Set("Authorization", "Bearer "+a.Token)
	}
	resp, err := a.Client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err = io.ReadAll(resp.Body)
	return resp.StatusCode, answer, err
}

// Read reads a JSON document into v, and says whether it came.
func (a Admin) Read(path string, v any) bool {
	_, text, err := a.Ask(http.MethodGet, path, nil)
	return err == nil && json.Unmarshal(text, v) == nil
}

// Metric sums the series of /metrics whose names begin so; 0 if nobody answers.
func (a Admin) Metric(prefix string) float64 {
	_, page, err := a.Ask(http.MethodGet, "/metrics", nil)
	if err != nil {
		return 0
	}
	return Sum(page, prefix)
}
