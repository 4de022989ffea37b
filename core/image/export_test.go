package image

import (
	"bytes"
	"io"
)

// FlattenTar merges layers and returns the tar stream that the converter gets.
func FlattenTar(layers ...[]byte) ([]byte, error) {
	src, err := testSources(layers)
	if err != nil {
		return nil, err
	}
	p, err := merge(src)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = p.writeTar(&out, src, nil)
	return out.Bytes(), err
}

// FlattenExt4 merges layers into an ext4 image at path.
func FlattenExt4(path string, max int64, layers ...[]byte) error {
	src, err := testSources(layers)
	if err != nil {
		return err
	}
	p, err := merge(src)
	if err != nil {
		return err
	}
	return p.writeExt4(path, src, max, nil)
}

func testSources(layers [][]byte) ([]layerSource, error) {
	var out []layerSource
	for _, b := range layers {
		l, err := scanLayer("test", func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil }, "", 256<<20)
		if err != nil {
			return nil, err
		}
		out = append(out, l)
	}
	return out, nil
}

// SuiteSources is suiteSources.
var SuiteSources = suiteSources
