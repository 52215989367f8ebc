package engine

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/rigs/real/recording"
)

// TestRecordedMetricsAreRead reads the pages of real engines: alone, prefill and decode, idle and
// busy.
func TestRecordedMetricsAreRead(t *testing.T) {
	all, err := recording.All()
	require.NoError(t, err)
	pages := 0
	for _, r := range all {
		if r.Ask.Path != "/metrics" {
			continue
		}
		pages++
		t.Run(r.Name, func(t *testing.T) {
			s, err := MetricNames{}.Parse(r.Body())
			require.NoError(t, err)
			require.Equal(t, []string{"0"}, s.Engines())
			require.Greater(t, s.StartTime, 1.7e9)
			blocks := int64(2000)
			if r.Engine == "prefill" {
				blocks = 90
			}
			require.Equal(t, Memory{Capacity: Reading{blocks * 32, sizeLabel}, Block: Reading{32, effectiveLabel}}, s.Memories(nil).Of(-1))
			running, ok := s.Running(-1)
			require.True(t, ok)
			waiting, ok := s.Waiting(-1)
			require.True(t, ok)
			usage, ok := s.KVUsage(-1)
			require.True(t, ok)
			generated, ok := s.Generated(-1)
			require.True(t, ok)
			require.Positive(t, generated)
			require.Zero(t, waiting)
			if strings.HasSuffix(r.Name, "-running") {
				require.EqualValues(t, 3, running)
				require.Positive(t, usage)
			} else {
				require.Zero(t, running)
			}
			missed, ok := s.NotPulledTokens(-1)
			require.True(t, ok)
			if r.Engine == "decode" {
				require.Positive(t, missed, "it computed the last block of each prompt, and the prompts without a hand-off")
			}
		})
	}
	require.Equal(t, 7, pages)
}

// TestRecordedModelsAreRead reads /v1/models as a real engine answers it.
func TestRecordedModelsAreRead(t *testing.T) {
	all, err := recording.All()
	require.NoError(t, err)
	for _, r := range all {
		if r.Ask.Path == "/v1/models" {
			models, err := parseModels(r.Body())
			require.NoError(t, err)
			require.Len(t, models, 1)
			require.Equal(t, "tiny", models[0].ID)
			require.Equal(t, 2048, models[0].MaxModelLen)
		}
	}
}

// TestRecordedAnswersPassTheClient serves each recording, head and pieces as they came, over a real
// socket.
func TestRecordedAnswersPassTheClient(t *testing.T) {
	all, err := recording.All()
	require.NoError(t, err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = ln.Close() }()
	byPath := map[string]*recording.Recording{}
	for _, r := range all {
		byPath["/"+r.Name] = r
	}
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go replay(conn, byPath)
		}
	}()
	client := NewClient(Options{})
	defer client.Close()
	target := &Target{ID: "recorded", URL: &url.URL{Scheme: "http", Host: ln.Addr().String()}, Rank: -1}
	for _, r := range all {
		call := client.NewCall(target)
		resp, err := call.Do(http.MethodGet, "/"+r.Name, nil, nil, Deadlines{Connect: time.Minute, FirstByte: time.Minute, Idle: time.Minute})
		require.NoError(t, err, r.Name)
		require.Equal(t, r.Status, resp.StatusCode(), r.Name)
		if typ := r.Header("Content-Type"); typ != "" {
			require.Equal(t, typ, string(resp.ContentType()), r.Name)
		}
		body, err := resp.ReadAll(1 << 20)
		resp.Close()
		if r.End == recording.Whole {
			require.NoError(t, err, r.Name)
			require.Equal(t, string(r.Body()), string(body), r.Name)
		} else {
			require.ErrorIs(t, err, io.ErrUnexpectedEOF, r.Name)
		}
	}
}

// replay answers the requests of a connection as recorded.
func replay(conn net.Conn, byPath map[string]*recording.Recording) {
	defer func() { _ = conn.Close() }()
	br := bufio.NewReader(conn)
	for {
		req, err := http.ReadRequest(br)
		if err != nil {
			return
		}
		r := byPath[req.URL.Path]
		var out bytes.Buffer
		fmt.Fprintf(&out, "HTTP/1.1 %d %s\r\n%s\r\n\r\n", r.Status, http.StatusText(r.Status), strings.Join(r.Head, "\r\n"))
		chunked := r.Header("Transfer-Encoding") == "chunked"
		for _, piece := range r.Pieces {
			if chunked {
				fmt.Fprintf(&out, "%x\r\n%s\r\n", len(piece), piece)
			} else {
				out.WriteString(piece)
			}
			_, _ = conn.Write(out.Bytes())
			out.Reset()
		}
		if r.End != recording.Whole {
			return
		}
		if chunked {
			out.WriteString("0\r\n\r\n")
		}
		_, _ = conn.Write(out.Bytes())
	}
}
