package engine_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"time"

	"evenkeel/engine"
)

// A stream is read as it arrives. The two waits, for the first event and
// between events, are set apart.
func Example() {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: {}\n\ndata: [DONE]\n\n")
	}))
	defer srv.Close()
	u, err := url.Parse(srv.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	client := engine.NewClient(engine.Options{})
	defer client.Close()

	call := client.NewCall(&engine.Target{ID: "d0", URL: u, Rank: -1})
	// Hand call.Abort to whoever notices that the client has left.
	resp, err := call.Do("POST", "/v1/completions",
		[]engine.Header{{Name: "Content-Type", Value: "application/json"}},
		[][]byte{[]byte(`{"prompt":"hi"`), []byte(`,"stream":true}`)},
		engine.Deadlines{Connect: time.Second, FirstByte: time.Minute, Idle: time.Minute})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Close()
	buf := make([]byte, 4096)
	for {
		n, err := resp.Read(buf)
		fmt.Printf("%s", buf[:n])
		resp.SetIdle(2 * time.Minute)
		if err != nil {
			fmt.Println(errors.Is(err, io.EOF))
			return
		}
	}
	// Output:
	// data: {}
	//
	// data: [DONE]
	//
	// true
}

// An error says whether the engine can have run the request.
func ExampleError() {
	u := &url.URL{Scheme: "http", Host: "engine.invalid"}
	client := engine.NewClient(engine.Options{})
	defer client.Close()
	_, err := client.NewCall(&engine.Target{ID: "p0", URL: u, Rank: -1}).
		Do("POST", "/v1/completions", []engine.Header{{Name: "X-Id", Value: "1\r\nHost: evil"}}, nil, engine.Deadlines{})
	var e *engine.Error
	fmt.Println(errors.As(err, &e), e.Sent)
	fmt.Println(err)
	// Output:
	// true false
	// engine p0: check request: request refused before it was sent: header X-Id has a control character in its value
}
