package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
)

func TestASurveyThatIsAskedWrongly(t *testing.T) {
	there := textFile(t, "report.html", "an older one")
	for name, tt := range map[string]struct {
		flags []string
		says  string
	}{
		"too often":  {[]string{"--every", "10ms"}, "take 200ms or more"},
		"too short":  {[]string{"--for", "2s"}, "ten times that or more"},
		"slots":      {[]string{"--slots", "5000"}, "a number up to 4096"},
		"twice":      {[]string{"--engines", "127.0.0.1:1"}, "the address is given twice"},
		"no address": {[]string{"--engines", "ftp://127.0.0.1:2"}, "--engines ftp://127.0.0.1:2: "},
		"a report":   {[]string{"--out", there}, there},
	} {
		t.Run(name, func(t *testing.T) {
			status, out, errs := line(append([]string{"survey", "--engines", "127.0.0.1:1"}, tt.flags...)...)
			require.NotZero(t, status)
			require.Empty(t, out)
			require.Contains(t, errs, tt.says)
		})
	}
	kept, err := os.ReadFile(there)
	require.NoError(t, err)
	require.Equal(t, "an older one", string(kept))
}

// Engines that nobody asks anything have nothing to level, and the report is still made.
func TestASurveyOfEnginesThatAreIdle(t *testing.T) {
	e, err := refengine.Start(refengine.Config{Role: refengine.Decode, DPSize: 2, DPMode: "internal",
		Steps: refengine.Steps{C0: time.Millisecond}})
	require.NoError(t, err)
	t.Cleanup(func() { e.Close() })
	page := filepath.Join(t.TempDir(), "report.html")
	status, out, errs := line("survey", "--engines", e.URLs()[0], "--for", "2s", "--every", "200ms", "--out", page)
	require.Equal(t, 0, status, errs)
	require.Contains(t, errs, "report: "+page)
	require.Contains(t, out, "nothing was answered meanwhile")
	html, err := os.ReadFile(page)
	require.NoError(t, err)
	require.Contains(t, string(html), "evenkeel survey")
}
