package report

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheWaterlineMoves(t *testing.T) {
	r := &Report{Model: model}
	require.Empty(t, r.Waterline(), "there is nothing to compare")
	for i, policy := range []string{"jsq", "jsq-kv", "even<keel>"} {
		steps := saw(400, 9000-4000*i)
		r.Runs = append(r.Runs, Run{Policy: policy, Steps: steps, Window: Window{steps[50].Start, steps[350].Start}})
	}
	svg := r.Waterline()
	require.Less(t, len(svg), 300<<10)
	require.Contains(t, svg, ">jsq-kv</text>")
	require.Contains(t, svg, ">even&lt;keel&gt;</text>")
	require.NotContains(t, svg, ">jsq</text>")
	require.Equal(t, 2*4+2, strings.Count(svg, "@keyframes"), "a column for each rank, and a line for each policy")
	require.Contains(t, svg, "prefers-reduced-motion")
	r.Runs[1].Policy = "br0"
	require.Contains(t, r.Waterline(), ">jsq</text>", "else the first")
	d := xml.NewDecoder(strings.NewReader(svg))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else {
			require.NoError(t, err)
		}
	}
	r.Runs = r.Runs[:1]
	require.Empty(t, r.Waterline())
}

func TestTheWaterlineOfManyRanksStaysSmall(t *testing.T) {
	r := &Report{Model: model}
	for _, policy := range []string{"jsq-kv", "evenkeel"} {
		steps := saw(400, 9000)
		for i := range steps {
			wide := make([]int, 0, 576)
			for range 144 {
				wide = append(wide, steps[i].KVTokens...)
			}
			steps[i].KVTokens = wide
		}
		r.Runs = append(r.Runs, Run{Policy: policy, Steps: steps, Window: Window{steps[50].Start, steps[350].Start}})
	}
	svg := r.Waterline()
	require.Less(t, len(svg), 300<<10)
	require.Contains(t, svg, `width="0.6"`, "a column is seen")
	require.NotContains(t, svg, `width="-`)
}
