package receipt

import (
	"bytes"
	"encoding/json"
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// docs/traces.md shows a receipt as it is, and with no field that is none.
func TestTheReceiptInTheDocsIsOne(t *testing.T) {
	page, err := os.ReadFile("../../docs/traces.md")
	require.NoError(t, err)
	found := regexp.MustCompile("(?s)```json\n(.*?)```").FindSubmatch(page)
	require.NotNil(t, found)
	var shown struct {
		Kept     int       `json:"kept"`
		Running  int       `json:"running"`
		Receipts []Receipt `json:"receipts"`
	}
	dec := json.NewDecoder(bytes.NewReader(found[1]))
	dec.DisallowUnknownFields()
	require.NoError(t, dec.Decode(&shown))
	r := shown.Receipts[0]
	require.Equal(t, Ended, r.State)
	require.Positive(t, r.Deadline)
	require.Less(t, r.TTFT, r.Deadline)
	for _, field := range []string{"`class`", "`priority`", "`deadline_ms`"} {
		require.Contains(t, string(page), field, "what a request may wait for")
	}
	require.NotNil(t, r.Attempts[0].Prefill)
	require.Equal(t, r.Attempts[0].Waits.Pool, r.Waits.Pool)
	require.InDelta(t, r.Total, r.Waits.Parse+r.Waits.Queue+r.Waits.Prefill+r.Waits.Pool+r.Waits.Transfer+r.Waits.Relay, 1)
}
