package live

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestThePastIsKeptForAWhile(t *testing.T) {
	var p past
	_, ok := p.find(1 << 60)
	require.False(t, ok)
	for i := range 2000 {
		p.keep(int64(1000*i), fmt.Appendf(nil, `{"at_ms":%d}`, 1000*i))
	}
	for at, want := range map[int64]string{1_999_000: `{"at_ms":1999000}`, 1_500_400: `{"at_ms":1500000}`, 1 << 60: `{"at_ms":1999000}`} {
		data, ok := p.find(at)
		require.True(t, ok, at)
		var b bytes.Buffer
		require.NoError(t, unzip(data, &b))
		require.Equal(t, want, b.String())
	}
	_, ok = p.find(1_000_000)
	require.False(t, ok, "it is more than 15 minutes ago")
	require.Len(t, p.list, 901)
}

func TestThePastIsBoundedInBytes(t *testing.T) {
	var p past
	noise := make([]byte, pastBytes/10)
	for i := range 30 {
		_, _ = rand.Read(noise)
		p.keep(int64(i), noise)
		require.LessOrEqual(t, p.bytes, pastBytes)
	}
	require.Len(t, p.list, 9)
}

func TestThePastBeginsAnewWhenTheClockIsSetBack(t *testing.T) {
	var p past
	for _, at := range []int64{10_000_000, 10_005_000, 10_003_000, 6_000_000, 6_001_000} {
		p.keep(at, fmt.Append(nil, at))
		data, ok := p.find(10_006_000)
		require.True(t, ok)
		var b bytes.Buffer
		require.NoError(t, unzip(data, &b))
		require.Equal(t, fmt.Sprint(at), b.String(), "the last one")
	}
	require.Len(t, p.list, 2)
	_, ok := p.find(6_000_000)
	require.True(t, ok)
}
