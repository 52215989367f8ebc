package main

import (
	"bytes"
	"encoding/json"
	"os"
	"runtime/debug"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTheBillNamesEachModuleOnce(t *testing.T) {
	info := &debug.BuildInfo{
		Path: "evenkeel/cmd/evenkeel", GoVersion: "go1.26.8",
		Deps: []*debug.Module{
			{Path: "go.uber.org/zap", Version: "v1.28.0", Sum: "h1:zap="},
			{Path: "example.com/old", Version: "v1.0.0+incompatible", Replace: &debug.Module{Path: "example.com/new", Version: "v2.0.0+incompatible", Sum: "h1:new="}},
		},
		Settings: []debug.BuildSetting{{Key: "GOARCH", Value: "arm64"}, {Key: "-ldflags", Value: "-s"}},
	}
	d := bill(info, []byte("the program"), "v1.2.3", time.Unix(1_760_000_000, 0).UTC())
	require.Regexp(t, `^urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`, d.Serial)
	require.Equal(t, "evenkeel v1.2.3", d.Metadata.Component.Name+" "+d.Metadata.Component.Version)
	require.Equal(t, []property{{"go:build:GOARCH", "arm64"}}, d.Metadata.Component.Properties)
	require.Equal(t, "2025-10-09T08:53:20Z", d.Metadata.Timestamp.Format(time.RFC3339))
	var refs []string
	for _, c := range d.Components {
		refs = append(refs, c.Ref)
	}
	require.Equal(t,
		[]string{"pkg:golang/stdlib@1.26.8", "pkg:golang/go.uber.org/zap@v1.28.0", "pkg:golang/example.com/new@v2.0.0%2Bincompatible"}, refs)
	require.Equal(t, refs, d.Dependencies[0].DependsOn)
	require.Equal(t, []property{{"go:sum", "h1:new="}}, d.Components[2].Properties)
}

// The program is this test itself.
func TestTheSameProgramGivesTheSameBytes(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	t.Setenv("SOURCE_DATE_EPOCH", "1760000000")
	var first, second bytes.Buffer
	for _, out := range []*bytes.Buffer{&first, &second} {
		require.NoError(t, run(t.Context(), []string{"-version", "v1.2.3", self}, out))
	}
	require.Equal(t, first.String(), second.String())
	require.True(t, json.Valid(first.Bytes()))
}

func TestABillNeedsAProgram(t *testing.T) {
	require.ErrorContains(t, run(t.Context(), nil, nil), "name one program")
	require.Error(t, run(t.Context(), []string{"main.go"}, nil), "a file that is no program")
}
