package browser

import (
	"bytes"
	"image"
	"image/color"
	"image/png"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestAPictureOfFewColoursKeepsThem(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		colors := rapid.SliceOfN(rapid.Uint32(), 1, 256).Draw(t, "colours")
		picture := image.NewRGBA(image.Rect(0, 0, 16, 16))
		for i := range picture.Pix {
			if i%4 == 3 {
				picture.Pix[i] = 255
			} else {
				picture.Pix[i] = byte(colors[i/4%len(colors)] >> (8 * (i % 4)))
			}
		}
		flat := withPalette(picture)
		for y := range 16 {
			for x := range 16 {
				require.Equal(t, picture.At(x, y), flat.At(x, y))
			}
		}
	})
}

func TestAPictureOfManyColoursIsCloseAndSmaller(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	picture := image.NewRGBA(image.Rect(0, 0, 200, 200))
	for y := range 200 {
		for x := range 200 {
			picture.Set(x, y, color.RGBA{R: byte(x + rng.IntN(20)), G: byte(y), B: byte(x + y), A: 255})
		}
	}
	picture.Set(7, 7, color.RGBA{R: 255, A: 255}) // a point that is alone in its colour
	file := filepath.Join(t.TempDir(), "p.png")
	var before bytes.Buffer
	require.NoError(t, png.Encode(&before, picture))
	require.NoError(t, os.WriteFile(file, before.Bytes(), 0o600))
	require.NoError(t, Shrink(filepath.Dir(file), io.Discard))
	after, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Less(t, len(after), before.Len())
	shrunk, err := png.Decode(bytes.NewReader(after))
	require.NoError(t, err)
	for y := range 200 {
		for x := range 200 {
			r, g, b, _ := picture.At(x, y).RGBA()
			r2, g2, b2, _ := shrunk.At(x, y).RGBA()
			for _, d := range []int{int(r) - int(r2), int(g) - int(g2), int(b) - int(b2)} {
				require.LessOrEqual(t, max(d, -d)>>8, 48, "at %d, %d", x, y)
			}
		}
	}
}
