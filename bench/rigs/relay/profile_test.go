//go:build linux

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestWhatTheTimeOfAProfileWasFor(t *testing.T) {
	text := `File: evenkeel
Type: cpu
Duration: 4s, Total samples = 100us (0.1%)
-----------+-------------------------------------------------------
      60us   internal/runtime/syscall.Syscall6
             syscall.RawSyscall6
             syscall.read
             evenkeel/gateway/loop.(*Loop).run
-----------+-------------------------------------------------------
      bytes:  8
      30us   evenkeel/sse.(*Reader).Next
             evenkeel/gateway/loop.(*Loop).run
-----------+-------------------------------------------------------
      10us   memmove
-----------+-------------------------------------------------------
`
	require.Equal(t, []Cost{{"reading sockets", 0.6}, {"events: reading and counting", 0.3}, {"the rest", 0.1}}, costsOf([]byte(text)))
}

// A missed aim is shown with what the time was for, a met one without.
func TestMissedRowsShowTheirProfile(t *testing.T) {
	s := &store{Profiles: map[string][]Cost{"spread-100": {{"memory", 0.25}}, "single": {{"memory", 0.5}}}}
	add := func(row, proxy string, chunk, request int) {
		s.Samples = append(s.Samples, Sample{Row: row, Cores: 1, Proxy: proxy, Chunk: time.Duration(chunk), Request: time.Duration(request)})
	}
	add("spread-100", nginxName, 10, 10)
	add("spread-100", evenkeelName, 17, 17)
	add("single", routerName, 10, 10)
	add("single", evenkeelName, 8, 8)
	var out strings.Builder
	s.writeProfiles(&out)
	require.Contains(t, out.String(), "| memory | 25 % |\n")
	require.NotContains(t, out.String(), "50 %")
}
